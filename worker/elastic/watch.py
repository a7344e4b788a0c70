"""Watching the next member: one that is silent ends the step of all before a collective would.

A killed process closes its connections, and collectives fail at once. One that is stopped, or whose
host is gone, leaves the others waiting; so every member pings the one after it, and raises an alarm
at all when there is no answer. The time-out is that of the lighthouse, which then leaves it out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from worker.elastic.host import dial
from worker.elastic.quorum import Member
from worker.elastic.wire import WireError, receive_frame, send_frame


class Watch:
    """Pings one member until `stop`; calls `silent` once if it does not answer in time."""

    def __init__(
        self, member: Member, timeout_seconds: float, silent: Callable[[str], None]
    ) -> None:
        self._member = member
        self._timeout = timeout_seconds
        self._silent = silent
        self._over = threading.Event()
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def stop(self) -> None:
        """Watch no more; does not wait for a ping on its way."""
        self._over.set()

    def _run(self) -> None:
        try:
            with dial(self._member, self._timeout) as connection:
                while not self._over.wait(self._timeout / 10):
                    started = time.monotonic()
                    send_frame(connection, {"kind": "ping"})
                    receive_frame(connection)
                    if time.monotonic() - started > self._timeout:
                        break  # this process was stopped itself; the others have gone on
        except TimeoutError:
            why = f"{self._member} was silent for {self._timeout:g} s"
        except (OSError, WireError) as error:
            why = f"{self._member} is gone: {error}"
        else:
            why = "this member was stopped for a while"
        if not self._over.is_set():
            self._silent(why)
