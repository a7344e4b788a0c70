"""What `make evidence` asks for, how long that takes, and what it leaves in the result files.

Compared with: the benchmarks' own parsers, the seconds in the results, and lines written by hand.
Run alone: pytest tests/benchmarks/test_evidence.py
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from benchmarks import convergence, downlink, overlap
from benchmarks.convergence_tables import load
from benchmarks.evidence import (
    CORES,
    DOWNLINKS,
    OVERLAPS,
    STEPS,
    grids,
    measured,
    merge,
    settings_of,
)

MINUTES = 25  # of the hour that all of it may take on two cores; on slow ones the rest took 20
START_SECONDS = 6  # of a process: imports


def grid(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What identifies each run that is asked for."""
    for line in grids(STEPS):
        words = ["x", "--out", "x", "--model", "small", "--steps", str(STEPS), *shlex.split(line)]
        monkeypatch.setattr(sys, "argv", words)
        yield from (label for label, _ in convergence.grid(convergence.parse_arguments()))


def test_the_grid_fits_in_its_share_of_the_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the seconds of CPU of the same runs, or of the same method, in the results."""
    runs = [run for run in load() if run["model"] == "small"]
    by_key = {run["key"]: run["cpu_seconds"] for run in runs}
    by_method: dict[str, list[float]] = {}
    for run in runs:
        by_method.setdefault(run["method"], []).append(run["cpu_seconds"])
    labels = list(grid(monkeypatch))
    seconds = sum(by_key.get(a["key"], fmean(by_method[a["method"]])) for a in labels)
    assert {label["data"] for label in labels} == {"eras", "iid", "domains"}
    assert (seconds + START_SECONDS * len(grids(STEPS))) / CORES < 60 * MINUTES


def test_no_run_is_asked_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [label["key"] for label in grid(monkeypatch)]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(("program", "lines"), [(overlap, OVERLAPS), (downlink, DOWNLINKS)])
def test_the_other_lines_are_understood(
    program: Any, lines: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for line in lines:
        monkeypatch.setattr(sys, "argv", ["x", "--out", "x", *shlex.split(line)])
        assert len(program.parse_arguments().seed) == 3


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_run_takes_the_place_of_its_own_repetition_only(tmp_path: Path) -> None:
    one = {"seed": 0, "delay": 5, "val_bpb_end": 2.0}  # written before runs named their model
    other = {"seed": 1, "delay": 5, "model": "small", "val_bpb_end": 3.0}
    again = {"seed": 0, "delay": 5, "model": "small", "val_bpb_end": 2.5}
    file = write(tmp_path / "results.jsonl", one, other)
    merge(file, write(tmp_path / "new.jsonl", again), settings_of)
    assert lines_of(file) == [again, other]
    assert not (tmp_path / "new.jsonl").exists()


def test_measurements_of_a_coordinator_are_told_apart_by_size_sites_and_encryption(
    tmp_path: Path,
) -> None:
    old = [{"params": 5, "sites": 2}, {"params": 5, "sites": 8}, {"tls": True}, {"tls": False}]
    file = write(tmp_path / "results.jsonl", *old)
    new = [{"params": 5, "sites": 8, "x": 1}, {"tls": True, "x": 2}]
    merge(file, write(tmp_path / "new.jsonl", *new), measured)
    assert lines_of(file) == [*new, old[0], old[3]]


def test_runs_that_are_too_short_do_not_get_into_the_tables() -> None:
    words = [sys.executable, "-m", "benchmarks.evidence", "--steps", "30", "--only", "grid"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--steps 30 makes other runs than the tables show: add --into DIR" in done.stderr
