"""`loco`, in a process whose wall clock can jump: SIGUSR1 an hour ahead, SIGUSR2 an hour back.

Only what Python reads through `time.time` jumps: that is every reading of the wall clock in loco
and its log. Run as `python -m tests.chaos.clocked coordinator ...`.
"""

from __future__ import annotations

import signal
import sys
import time
from types import FrameType

from loco.cli import main

HOUR = 3600.0

_true_time = time.time
_offset = 0.0


def _jump(number: int, _frame: FrameType | None) -> None:
    global _offset
    _offset += HOUR if number == signal.SIGUSR1 else -HOUR


if __name__ == "__main__":
    time.time = lambda: _true_time() + _offset
    signal.signal(signal.SIGUSR1, _jump)
    signal.signal(signal.SIGUSR2, _jump)
    sys.argv[0] = "loco"
    main()
