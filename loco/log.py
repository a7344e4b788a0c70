"""Log lines on stderr, for coordinator and workers alike.

As text by default, `TIME prefix message`; with LOCO_LOG=json one JSON object a line, with the
fields of `log_fields` and of the record's `extra`, so that a log store can filter by run, site,
round and phase. The environment reaches every rank that `loco worker --ranks N` starts.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime

from loco.errors import ConfigError

FIELDS = ("run", "site", "rank", "round", "phase")

_fields: dict[str, str | int] = {}


def log_fields(**fields: str | int) -> None:
    """From now on every JSON line of this process carries these; names are those of FIELDS."""
    _fields.update(fields)


def start_logging(prefix: str) -> None:
    """Send loco's log to stderr; `prefix` says who writes in the text form."""
    handler = logging.StreamHandler(sys.stderr)
    form = os.environ.get("LOCO_LOG", "text")
    if form not in ("text", "json"):
        raise ConfigError(f"LOCO_LOG={form!r} is not known: use text or json")
    text = logging.Formatter(f"%(asctime)s {prefix} %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonFormatter() if form == "json" else text)
    logger = logging.getLogger("loco")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, str | int] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        own = {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        line |= _fields | own
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
