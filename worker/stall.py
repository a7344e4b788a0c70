"""A slow link is not a dead one, but a peer that stands still is: transfers are watched by block.

gRPC's keepalive notices a broken connection; this notices a coordinator that answers pings and
moves no bytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

STALL_SECONDS = 60.0  # for one block of 256 KiB: a link of less than 35 kbit/s counts as stalled


class StalledError(Exception):
    """Nothing moved for too long; the transfer goes on from where it stood."""


class Motion:
    """When a block has last come or gone, of all calls that share a line."""

    at = 0.0


class Watch:
    """Cancels a call when nothing has moved for `STALL_SECONDS`; the block then raises.

    Calls that share a `motion` move while one of them does: on a slow line they take turns.
    """

    def __init__(self, motion: Motion | None = None) -> None:
        self._motion = motion or Motion()
        self._over = threading.Event()
        self._stalled = False

    def start(self, cancel: Callable[[], object]) -> None:
        """Watch from now on."""
        self.moved()
        self._thread = threading.Thread(target=self._watch, args=(cancel,), daemon=True)
        self._thread.start()

    def moved(self) -> None:
        """A block has come or gone."""
        self._motion.at = time.monotonic()

    def _watch(self, cancel: Callable[[], object]) -> None:
        while (left := self._motion.at + STALL_SECONDS - time.monotonic()) > 0:
            if self._over.wait(left):
                return
        self._stalled = True
        cancel()

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._stalled and error is not None:
            raise StalledError(f"nothing moved for {STALL_SECONDS:.0f} s") from error
