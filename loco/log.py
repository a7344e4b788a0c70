"""Log lines on stderr: one format for coordinator and workers."""

from __future__ import annotations

import logging
import sys


def start_logging(prefix: str) -> None:
    """Send loco's log to stderr as `TIME prefix message`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {prefix} %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("loco")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
