"""The committed dashboards: not stale, every metric exists, every panel says what it shows.

That the expressions return data of a real run is in tests/observability.
    pytest tests/deploy/test_dashboards.py
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from loco.metrics import CoordinatorMetrics

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
NOT_OURS = {
    "process_start_time_seconds",
    "process_resident_memory_bytes",
    "process_cpu_seconds_total",
}


def panels(path: Path) -> list[dict[str, Any]]:
    return [p for p in json.loads(path.read_text())["panels"] if p["type"] != "row"]


def test_generated_files_are_fresh() -> None:
    command = [sys.executable, "deploy/dashboards", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_four_dashboards() -> None:
    assert [path.stem for path in FILES] == ["bandwidth", "coordinator", "overview", "sites"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_metric_exists(path: Path) -> None:
    exported = {d.name for d in CoordinatorMetrics(CollectorRegistry()).catalogue.described}
    used = set(re.findall(r"\b(?:loco|process)_\w+", path.read_text()))
    bases = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used}
    assert bases - exported - NOT_OURS == set()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_panel_says_what_it_shows(path: Path) -> None:
    for panel in panels(path):
        assert panel["title"]
        assert panel["description"]
        assert panel["targets"]
        if panel["type"] != "table":
            assert panel["fieldConfig"]["defaults"]["unit"]
        if panel["type"] == "timeseries":
            assert all(target["legendFormat"] for target in panel["targets"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_query_obeys_the_variables(path: Path) -> None:
    for panel in panels(path):
        for target in panel["targets"]:
            assert "$instance" in target["expr"]
