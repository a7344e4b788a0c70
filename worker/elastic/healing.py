"""A new member takes the state of one that trains: most of it beside training, the rest standing.

What changes once a round at most (theta, EF, frozen parameters) is fetched while the others go on.
It is read from under their hands, so it may be torn or old; what is not as it must be is found by
the digests of its pieces and sent again in the meeting, with all that changes in every step.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

from pydantic import TypeAdapter
from torch import Tensor

from loco.errors import LocoError
from loco.inner.base import InnerOptimizer
from worker.elastic.host import dial, listens
from worker.elastic.meeting import Standing
from worker.elastic.quorum import Member
from worker.elastic.wire import WireError, receive_frame, send_frame

log = logging.getLogger("loco.worker")

SETTLE_SECONDS = 0.1  # between two looks at whether the source has settled


class Replica(Protocol):
    """What a member trains, as its site sees it; `worker.elastic.replica` has the real one."""

    def give(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Everything that all ranks have alike, as JSON and tensors, shared."""

    def digest(self) -> str:
        """Digest of what `give` gives."""

    def take(self, connection: socket.socket, header: dict[str, Any]) -> int:
        """Receive what another member gives, and check it; the number of bytes that came."""

    def give_beside(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Of `give`, what can be fetched while this member trains."""

    def take_beside(self, connection: socket.socket, header: dict[str, Any]) -> int:
        """Receive and keep it until `take`; the number of bytes."""

    def known(self) -> dict[str, list[str]]:
        """What `take` need not receive again: digests by tensor."""

    @property
    def optimizer(self) -> InnerOptimizer:
        """Holds what ranks do not have alike."""

    def divided(self) -> None:
        """The site's rank or number of ranks is another now."""


class Healing:
    """One member's way to the state of the others; each part has a time-out of its own."""

    def __init__(self, replica: Replica, heal_seconds: float) -> None:
        self._replica = replica
        self._heal_seconds = heal_seconds
        self._source: Member | None = None
        self._beside: Future[int] | None = None
        self.bytes = 0
        """What came so far."""

    def begin(self, source: Member) -> None:
        """Fetch beside the training of `source`, unless that goes on already."""
        if self._beside is not None:
            return
        self._source, self._beside = source, Future()
        thread = threading.Thread(target=self._fetch, args=(source, self._beside), daemon=True)
        thread.start()

    def _fetch(self, source: Member, into: Future[int]) -> None:
        try:
            with dial(source, self._heal_seconds) as connection:
                send_frame(connection, {"kind": "beside"})
                into.set_result(self._replica.take_beside(connection, receive_frame(connection)))
        except Exception as error:  # `prepared` raises it
            into.set_exception(error)

    @property
    def is_over(self) -> bool:
        """Whether what can be fetched beside training is here, or will not come."""
        return self._beside is not None and self._beside.done()

    @property
    def prepared(self) -> bool:
        """Whether all that can be fetched beside training is here.

        A source that has died is no failure: another one is named in the next meeting.

        Raises:
            LocoError: it did not come in time, or damaged, or is of another model.
        """
        if not self.is_over:
            return False
        assert self._beside is not None
        assert self._source is not None
        try:
            self.bytes = self._beside.result()
        except (OSError, WireError) as error:
            self._beside = None
            if listens(self._source):
                raise LocoError(
                    f"the state of the site did not come from {self._source}: {error}. The others "
                    "have gone on; give --heal-seconds more if the network is slow"
                ) from error
            return False
        return True

    def take(self, source: Member) -> dict[str, Any]:
        """In a meeting: the rest; the header with the place that the state belongs to."""
        started = time.monotonic()
        until = started + self._heal_seconds
        message = {"kind": "state", "known": self._replica.known()}
        with dial(source, self._heal_seconds) as connection:
            send_frame(connection, message)
            header = receive_frame(connection)
            while "refused" in header and time.monotonic() < until:  # it is just settling
                time.sleep(SETTLE_SECONDS)
                send_frame(connection, message)
                header = receive_frame(connection)
            if "refused" in header:
                raise WireError(header["refused"])
            rest = self._replica.take(connection, header["replica"])
        log.info(
            "took the state of %s, every digest right: %.1f MB beside training, %.1f MB in %.2f s "
            "while the others waited",
            source,
            self.bytes / 1e6,
            rest / 1e6,
            time.monotonic() - started,
        )
        self.bytes += rest
        return header


def standing_of(header: dict[str, Any]) -> Standing:
    """Where a member stands that has taken the state of another: at no rank yet."""
    standing = TypeAdapter(Standing).validate_python(header["standing"])
    return replace(standing, rank=-1, backup_of=-1)
