"""Prometheus' files, by its own tools: valid, and every alert proven to fire and to stay quiet.

That the expressions return data of a real run is in tests/observability.
    pytest tests/deploy/test_prometheus.py
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.programs import program

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
UNIT_TESTS = Path(__file__).with_name("alerts_test.yml")


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def promtool(*arguments: str) -> None:
    done = subprocess.run([program("promtool"), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_config_and_rules_are_valid() -> None:
    promtool("check", "config", str(PROMETHEUS / "prometheus.yml"))


def test_what_is_scraped_is_what_a_coordinator_serves() -> None:
    """A target that nobody serves shows empty panels; tests/deploy/test_compose.py scrapes one."""
    (job,) = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    (static,) = job["static_configs"]
    unit = (ROOT / "deploy" / "systemd" / "loco-coordinator.service").read_text()
    assert static["targets"] == re.findall(r"--metrics (\S+)", unit)


def test_alerts_fire_and_stay_quiet_as_told() -> None:
    promtool("test", "rules", str(UNIT_TESTS))


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_each_alert_has_both_kinds_of_unit_test(alert: dict[str, Any]) -> None:
    expectations = [
        bool(check["exp_alerts"])
        for test in yaml.safe_load(UNIT_TESTS.read_text())["tests"]
        for check in test["alert_rule_test"]
        if check["alertname"] == alert["alert"]
    ]
    assert set(expectations) == {True, False}


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_each_alert_has_a_runbook_section(alert: dict[str, Any]) -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    sections = re.findall(r"^### (\w+)$", text, re.MULTILINE)
    assert alert["alert"] in sections
    assert alert["annotations"]["runbook"] == f"docs/operations.md#{alert['alert'].lower()}"


def test_no_runbook_section_is_left_over() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    sections = set(re.findall(r"^### (Loco\w+)$", text, re.MULTILINE))
    assert sections == {alert["alert"] for alert in alerts()}
