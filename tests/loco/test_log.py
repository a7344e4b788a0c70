"""Log lines: text for people, one JSON object a line for log stores.

pytest tests/loco/test_log.py
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import datetime

import pytest

from loco import log as loco_log
from loco.log import JsonFormatter, log_fields, start_logging


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    logger = logging.getLogger("loco")
    before = (logger.handlers, logger.level, logger.propagate)
    fields = dict(loco_log._fields)
    loco_log._fields.clear()
    yield
    logger.handlers, logger.level, logger.propagate = before
    loco_log._fields.clear()
    loco_log._fields.update(fields)


def test_json_lines_carry_the_fields(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCO_LOG", "json")
    start_logging("coordinator")
    log_fields(run="r-1", round=3, phase="open")
    logging.getLogger("loco.coordinator").warning(
        "site %s is late", "paris", extra={"site": "paris"}
    )
    line = json.loads(capsys.readouterr().err)
    assert datetime.fromisoformat(line.pop("time")).utcoffset() is not None
    assert line == {
        "level": "warning",
        "logger": "loco.coordinator",
        "message": "site paris is late",
        "run": "r-1",
        "round": 3,
        "phase": "open",
        "site": "paris",
    }


def test_a_message_of_several_lines_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCO_LOG", "json")
    start_logging("x")
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        logging.getLogger("loco").exception("failed:\nbadly")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "ValueError: first" in json.loads(lines[0])["exception"]


def test_text_has_the_prefix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LOCO_LOG", raising=False)
    start_logging("paris/0")
    logging.getLogger("loco.worker").info("hello")
    assert capsys.readouterr().err.endswith(" paris/0 hello\n")


def test_an_unknown_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCO_LOG", "yaml")
    with pytest.raises(ValueError, match=r"LOCO_LOG='yaml' is not known: use text or json"):
        start_logging("x")


def test_formatter_keeps_what_is_not_ascii() -> None:
    record = logging.LogRecord("loco", logging.INFO, "f", 1, "Zürich", None, None)
    assert "Zürich" in JsonFormatter().format(record)
