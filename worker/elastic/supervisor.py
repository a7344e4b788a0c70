"""`loco worker --fault-tolerance torchft`: keeps the ranks of one node, and a lighthouse, alive.

A rank that dies is started again, after a growing pause and at most so often; it takes its state
from those that go on. The site ends when its last rank has ended, or one that must not come back
has said why (refused, bad configuration, not finite).
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field

from loco.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_UNREACHABLE,
)
from loco.processes import interrupt_on_sigterm, spawn, stop_all
from worker.elastic.lighthouse import command as lighthouse_command
from worker.options import Options

log = logging.getLogger("loco.worker")

POLL_SECONDS = 0.05
PAUSE_SECONDS = 0.5  # before the first restart; doubles, up to a minute
MAX_PAUSE_SECONDS = 60.0
END_SECONDS = 10.0  # between the ends of ranks that end together
LIGHTHOUSE_PAUSE_SECONDS = 5.0  # between two starts of it; one that lived longer is back at once
CALM_SECONDS = 600.0  # a rank that lived so long begins its restarts anew


@dataclass
class _Rank:
    """One slot, and the processes that filled it."""

    slot: int
    process: subprocess.Popen[bytes]
    started: float = field(default_factory=time.monotonic)
    restarts: int = 0
    due: float | None = None
    """When the next process starts; None while one runs or the rank is done."""


def supervise(options: Options) -> int:
    """Run the node's ranks; the exit code of the site as far as this node knows."""
    interrupt_on_sigterm()
    return _Supervisor(options).run()


class _Supervisor:
    def __init__(self, options: Options) -> None:
        assert options.elastic is not None
        self._options = options
        self._elastic = options.elastic
        self._address = options.elastic.lighthouse or f"127.0.0.1:{free_port()}"
        self._lighthouse: subprocess.Popen[bytes] | None = None
        self._lighthouse_started = 0.0
        self._ranks: list[_Rank] = []
        self._finished: float | None = None

    def run(self) -> int:
        try:
            self._keep_lighthouse()
            first, local = self._elastic.first_rank, self._elastic.local_ranks
            self._ranks = [_Rank(slot, self._spawn(slot)) for slot in range(first, first + local)]
            while True:
                code = self._look()
                if code is not None:
                    return code
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        finally:
            lighthouse = [self._lighthouse] if self._lighthouse else []
            stop_all([rank.process for rank in self._ranks])
            stop_all(lighthouse)

    def _look(self) -> int | None:
        """Start again what died; the exit code once the site is over here."""
        self._keep_lighthouse()
        codes = [rank.process.poll() for rank in self._ranks]
        if EXIT_DONE in codes:
            return self._end(codes)
        for rank, code in zip(self._ranks, codes, strict=True):
            if code is None:
                continue
            if EXIT_FAILED < code <= EXIT_INTERRUPTED and code != EXIT_UNREACHABLE:
                return code
            if not self._start_again(rank, code):
                return EXIT_FAILED if code < 0 else code
        return None

    def _end(self, codes: list[int | None]) -> int | None:
        """The run is finished, as ranks that trained to its end say; all of those end together.

        One that was on its way back finds nobody, and is stopped before it begins the site anew.
        """
        self._finished = self._finished or time.monotonic()
        late = time.monotonic() - self._finished > END_SECONDS
        return EXIT_DONE if late or None not in codes else None

    def _start_again(self, rank: _Rank, code: int) -> bool:
        """Whether the rank may come back; it does when its pause is over."""
        now = time.monotonic()
        if rank.due is None:
            if now - rank.started > CALM_SECONDS:
                rank.restarts = 0
            if rank.restarts >= self._elastic.max_restarts:
                log.error("rank %d died %d times; the site ends", rank.slot, rank.restarts + 1)
                return False
            pause = min(PAUSE_SECONDS * 2**rank.restarts, MAX_PAUSE_SECONDS)
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            log.warning("rank %d died (%s): starting it again in %.1f s", rank.slot, how, pause)
            rank.due = now + pause
        elif now >= rank.due:
            rank.due = None
            rank.restarts += 1
            rank.started = now
            rank.process = self._spawn(rank.slot)
        return True

    def _keep_lighthouse(self) -> None:
        """The site's own lighthouse, unless its address was given."""
        if self._elastic.lighthouse:
            return
        if self._lighthouse is not None:
            if self._lighthouse.poll() is None:
                return
            if time.monotonic() - self._lighthouse_started < LIGHTHOUSE_PAUSE_SECONDS:
                return  # it cannot live, perhaps because its port was taken
            log.warning("the lighthouse died (%d): starting it again", self._lighthouse.returncode)
        command = lighthouse_command(self._address, self._elastic.rank_timeout_seconds)
        self._lighthouse_started = time.monotonic()
        self._lighthouse = spawn(command, {"RUST_LOG": os.environ.get("RUST_LOG", "error")})

    def _spawn(self, slot: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "worker", *self._options.arguments()]
        environment = {
            "RANK": str(slot),
            "LOCAL_RANK": str(slot - self._elastic.first_rank),
            "WORLD_SIZE": str(self._elastic.site_ranks),
            "LOCAL_WORLD_SIZE": str(self._elastic.local_ranks),
            "LOCO_LIGHTHOUSE": self._address,
            "RUST_LOG": os.environ.get("RUST_LOG", "error"),
        }
        if not self._elastic.lighthouse:
            environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        return spawn(command, environment)


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
