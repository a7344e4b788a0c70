"""A ceiling for what a rank sends and receives, where the site's line has other users."""

from __future__ import annotations

import threading
import time


class Throttle:
    """Spaces out the blocks of one direction; the lanes of a rank share it."""

    def __init__(self, bytes_per_second: float | None) -> None:
        """None: as fast as the line."""
        self._rate = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> None:
        """Return when so many bytes may move; their time is then spoken for."""
        if self._rate is None:
            return
        with self._lock:
            begin = max(time.monotonic(), self._free_at)
            self._free_at = begin + num_bytes / self._rate
        time.sleep(max(0.0, begin - time.monotonic()))
