"""The audit log: who did what, and what was refused, one JSON object a line.

    STATE/audit.jsonl, audit.jsonl.1 (older), ... audit.jsonl.5

It is for people: nothing reads it back. Whoever floods the coordinator with refused requests gets
a few lines a second, with the number of those that were left out.
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
        self._file = _Rotating(
            directory / FILE, maxBytes=MAX_BYTES, backupCount=KEPT_FILES, delay=True
        )
        self._clock = clock
        self._second = 0
        self._refusals = 0  # in this second
        self._left_out = 0

    def write(self, event: str, who: str, peer: str, **details: Value) -> None:
        """What happened, who asked for it (as authenticated), and from where."""
        now = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")
        line = {"time": now, "event": event, "who": who, "peer": peer, **details}
        text = json.dumps(line)  # ASCII: a terminal obeys some of the other letters
        self._file.handle(logging.makeLogRecord({"msg": text}))

    def refusal(self, who: str, peer: str, *, method: str, reason: str, message: str) -> None:
        """Like `write`, but bounded a second."""
        second = int(self._clock())
        if second != self._second:
            self._second, self._refusals = second, 0
        self._refusals += 1
        if self._refusals > REFUSALS_PER_SECOND:
            self._left_out += 1
            return
        missing = {"left_out_before": self._left_out} if self._left_out else {}
        self._left_out = 0
        self.write("refused", who, peer, method=method, reason=reason, message=message, **missing)

    def close(self) -> None:
        """What a full disk did not take is lost, and said."""
        try:
            self._file.close()
        except OSError as error:
            log.error("cannot write to the audit log: %s", error)
