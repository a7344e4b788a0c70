"""The audit log: who did what, and what was refused, one JSON object a line.

    STATE/audit.jsonl, audit.jsonl.1 (older), ... audit.jsonl.5     joins, leaves, orders
    STATE/refusals.jsonl, ...                                       what was refused

It is for people: nothing reads it back. Whoever floods the coordinator with refused requests gets
a few lines a second, with the number of those that were left out, and pushes no order out of sight.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path

log = logging.getLogger("loco.coordinator")

FILE = "audit.jsonl"
REFUSALS = "refusals.jsonl"
MAX_BYTES = 10_000_000
KEPT_FILES = 5
REFUSALS_PER_SECOND = 10

Value = str | int | float | None


class _Rotating(RotatingFileHandler):
    """A full disk must not end a request; the log on stderr says that lines are missing."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802 - logging's
        log.error("cannot write to the audit log: %s", sys.exc_info()[1])


class Audit:
    """Appends; from the event loop only."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        self._done, self._refused = (
            _Rotating(directory / name, maxBytes=MAX_BYTES, backupCount=KEPT_FILES, delay=True)
            for name in (FILE, REFUSALS)
        )
        self._clock = clock
        self._second = 0
        self._refusals = 0  # in this second
        self._left_out = 0

    def write(self, event: str, who: str, peer: str, **details: Value) -> None:
        """What happened, who asked for it (as authenticated), and from where."""
        self._write(self._done, event, who, peer, details)

    def _write(
        self, file: _Rotating, event: str, who: str, peer: str, details: dict[str, Value]
    ) -> None:
        now = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")
        line = {"time": now, "event": event, "who": who, "peer": peer, **details}
        text = json.dumps(line)  # ASCII: a terminal obeys some of the other letters
        file.handle(logging.makeLogRecord({"msg": text}))

    def refusal(self, who: str, peer: str, *, method: str, reason: str, message: str) -> None:
        """Like `write`, but bounded a second."""
        second = int(self._clock())
        if second != self._second:
            self._second, self._refusals = second, 0
        self._refusals += 1
        if self._refusals > REFUSALS_PER_SECOND:
            self._left_out += 1
            return
        details: dict[str, Value] = {"method": method, "reason": reason, "message": message}
        if self._left_out:
            details["left_out_before"] = self._left_out
        self._left_out = 0
        self._write(self._refused, "refused", who, peer, details)

    def close(self) -> None:
        """What a full disk did not take is lost, and said."""
        for file in (self._done, self._refused):
            try:
                file.close()
            except OSError as error:
                log.error("cannot write to the audit log: %s", error)
