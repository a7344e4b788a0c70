"""Lives of a real worker inside the test's process: torch is imported once, starting one is cheap.

A life ends as by SIGKILL where the test says so: nothing of it goes on but what is on disk and at
the coordinator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry

from loco.inner.groups import Group
from loco.metrics import Catalogue, WireMetrics
from loco.wire.v1 import coordinator_pb2 as pb
from worker.loop import Worker
from worker.options import Options
from worker.session import Session
from worker.site import Site

Moment = Callable[[str, int], bool]
"""(what the site is about to do or has done, round). A site "asks" after each push, and before one
only where the answer to the last question did not say how to go on."""

KILL_SECONDS = 60.0


class Killed(BaseException):
    """Stands for SIGKILL."""


class _MortalSession(Session):
    """Asks before and after each step of a round whether the life is over."""

    def __init__(self, address: str, site: str, patience: float, is_over: Moment) -> None:
        wire = WireMetrics(Catalogue(CollectorRegistry()))
        super().__init__(address, site, patience, wire)
        self._is_over = is_over

    def begin_push(self, header: pb.PushHeader, body: bytes) -> None:
        """A shard alone leaves in `push`: before any of its bytes has gone a life may end."""
        if header.num_shards > 1:
            super().begin_push(header, body)

    def push(self, header: pb.PushHeader, body: bytes) -> pb.PushResponse:
        self._moment("before push", header.round)
        answer = super().push(header, body)
        self._moment("after push", header.round)
        return answer

    def pull(self, round_: int, span: range) -> memoryview:
        self._moment("before pull", round_)
        data = super().pull(round_, span)
        self._moment("after pull", round_)
        return data

    def next_directive(self, have_round: int, theta_digest: str) -> pb.WaitRoundResponse:
        self._moment("asks", have_round)
        answer = super().next_directive(have_round, theta_digest)
        if answer.HasField("update"):  # it came along
            self._moment("before pull", have_round)
            self._moment("after pull", have_round)
        return answer

    def leave(self, reason: str) -> None:
        """Nobody who is killed says goodbye."""

    def _moment(self, what: str, round_: int) -> None:
        if self._is_over(what, round_):
            raise Killed


class Life:
    """One process life of a site of one rank, in a thread."""

    def __init__(
        self,
        address: str,
        site: str,
        *,
        checkpoint: Path | None = None,
        every: int = 1,
        patience: float = 60.0,
        is_over: Moment = lambda _what, _round: False,
    ) -> None:
        options = Options(
            coordinator=address,
            site=site,
            data=None,
            device="cpu",
            patience_seconds=patience,
            threads=1,
            metrics=None,
            checkpoint=checkpoint,
            checkpoint_every_rounds=every,
            link_mbit=None,
        )
        self.session = _MortalSession(address, site, patience, is_over)
        self.worker = Worker(options, Site(torch.device("cpu"), Group()), self.session)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"life of {site}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.worker.run()
        except BaseException as error:
            self.error = error
        finally:
            self.session.close()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def ends(self, seconds: float = KILL_SECONDS) -> BaseException | None:
        """Wait for its end; what ended it, None for the end of the run."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the life goes on"
        return self.error

    def finishes(self, seconds: float = KILL_SECONDS) -> None:
        """Wait for the end of the run; raises what ended the life before."""
        error = self.ends(seconds)
        if error is not None:
            raise error


def at(what: str, round_: int) -> Moment:
    """The life ends there."""
    return lambda now, now_round: (now, now_round) == (what, round_)
