"""The audit log's bounds: a flood of refusals, a full file, a full disk.

Who is told of what is in test_gate.py. Compared with: the lines on disk. Run alone:
pytest tests/coordinator/test_audit.py
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from coordinator import audit
from coordinator.audit import FILE, KEPT_FILES, REFUSALS, REFUSALS_PER_SECOND, Audit


class Clock:
    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def refuse(log: Audit, message: str = "no") -> None:
    log.refusal("site 'paris'", "ipv4:1", method="/m", reason="role", message=message)


def test_a_line_says_who_from_where_and_when(tmp_path: Path) -> None:
    log = Audit(tmp_path, Clock())
    log.write("join", "site 'paris'", "ipv4:10.0.0.7:50", site="paris", shards=2, text='100 %s "\n')
    log.close()
    assert lines(tmp_path / FILE) == [
        {
            "time": "2027-01-15T08:00:00.000+00:00",
            "event": "join",
            "who": "site 'paris'",
            "peer": "ipv4:10.0.0.7:50",
            "site": "paris",
            "shards": 2,
            "text": '100 %s "\n',
        }
    ]


def test_a_flood_writes_a_few_lines_a_second_and_their_number(tmp_path: Path) -> None:
    clock = Clock()
    log = Audit(tmp_path, clock)
    for _ in range(1000):
        refuse(log)
    clock.now += 1
    refuse(log)
    refuse(log)
    log.close()
    told = lines(tmp_path / REFUSALS)
    assert [line["event"] for line in told] == ["refused"] * (REFUSALS_PER_SECOND + 2)
    assert [line.get("left_out_before") for line in told[-2:]] == [1000 - REFUSALS_PER_SECOND, None]


def test_old_lines_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MAX_BYTES", 2000)
    log = Audit(tmp_path, Clock())
    for number in range(500):
        log.write("join", f"site {number}", "ipv4:1")
    log.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 1 + KEPT_FILES
    assert all(path.stat().st_size <= 2000 for path in files)
    assert lines(tmp_path / FILE)[-1]["who"] == "site 499"


def test_a_flood_of_refusals_pushes_no_order_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has given an order with a stolen key could hide it so."""
    monkeypatch.setattr(audit, "MAX_BYTES", 2000)
    clock = Clock()
    log = Audit(tmp_path, clock)
    log.write("control", "operator 'ops'", "ipv4:2")
    for _ in range(500):
        clock.now += 1
        refuse(log)
    log.close()
    assert [line["event"] for line in lines(tmp_path / FILE)] == ["control"]


def test_a_disk_that_is_full_is_said_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """/dev/full refuses every byte."""
    (tmp_path / FILE).symlink_to("/dev/full")
    log = Audit(tmp_path, Clock())
    with caplog.at_level(logging.ERROR, "loco.coordinator"):
        log.write("join", "site 'paris'", "ipv4:1")
        log.close()
    assert "cannot write to the audit log" in caplog.text
