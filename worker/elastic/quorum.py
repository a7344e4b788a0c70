"""Who is there: torchft's lighthouse, asked through torchft's manager.

Only membership is torchft's here. Its Python `Manager` would heal by unpickling what a peer sends,
raises for ever after one time-out, and throws steps away (`init_sync`); docs/torchft.md has the
list. So the servers below it are used directly.

A quorum's number means nothing by itself, because a restarted lighthouse begins at 1 again; what
counts is the set of members, and the name that they give themselves when they meet.
"""

from __future__ import annotations

import importlib.util
import logging
import secrets
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from loco.errors import ConfigError, UnreachableError

log = logging.getLogger("loco.worker")

HEARTBEAT_INTERVAL = timedelta(milliseconds=100)
ASK_SECONDS = 2.0  # one call; the lighthouse may let it wait for members that are still busy
SAY_SECONDS = 5.0
MISSING = (
    "torchft is not installed here (it has no wheel for aarch64 or Python 3.14; see "
    "docs/torchft.md to build it)"
)


def is_installed() -> bool:
    """Whether torchft can be imported; it is not imported here."""
    return importlib.util.find_spec("torchft") is not None


@dataclass(frozen=True, order=True)
class Member:
    """One process life of a rank. Members sort by slot: the text of an id never does."""

    slot: int
    """Which of the site's ranks it is; a restarted one has the slot of the one that died."""
    address: str
    """HOST:PORT where it answers other members."""
    life: str
    """Random: a new process is a new member."""

    @classmethod
    def new(cls, slot: int, address: str) -> Member:
        return cls(slot, address, secrets.token_hex(4))

    @property
    def id(self) -> str:
        """Replica id at the lighthouse; of fixed width, because torchft sorts ids as text."""
        return f"{self.slot:06d}@{self.address}#{self.life}"

    @classmethod
    def of(cls, replica_id: str) -> Member:
        """The inverse of `id`; ConfigError for a stranger at the lighthouse."""
        slot, at, rest = replica_id.partition("@")
        address, hash_, life = rest.partition("#")
        if not (at and hash_ and slot.isdigit()):
            raise ConfigError(
                f"{replica_id!r} is at this site's lighthouse and is no rank of loco: give every "
                "site a lighthouse of its own"
            )
        return cls(int(slot), address, life)

    def __str__(self) -> str:
        return f"rank {self.slot} ({self.address})"


@dataclass(frozen=True)
class Quorum:
    """Who asked the lighthouse together."""

    number: int
    members: tuple[Member, ...]  # sorted


class Lighthouse:
    """This member's line to the lighthouse; heartbeats begin with the first `ask`.

    On failure of the lighthouse `ask` waits for it, says so every 5 s, and raises UnreachableError
    after `patience_seconds`.
    """

    def __init__(self, address: str, me: Member, *, patience_seconds: float) -> None:
        self._address = address
        self._me = me
        self._patience_seconds = patience_seconds
        self._server: Any = None
        self._client: Any = None
        self._failures = 0
        self._beside: Future[Quorum] | None = None
        self._closed = False

    def ask_beside(self, version: int) -> None:
        """Ask in a thread, while the step is computed; `answer` has what came of it."""
        assert self._beside is None
        self._beside = future = Future[Quorum]()

        def run() -> None:
            try:
                future.set_result(self.ask(version, anew=False))
            except Exception as error:  # `answer` raises it
                future.set_exception(error)

        threading.Thread(target=run, name="quorum", daemon=True).start()

    def answer(self) -> Quorum | None:
        """What `ask_beside` found, once; blocks for it, raises as `ask`. None: nobody asked."""
        future, self._beside = self._beside, None
        return None if future is None else future.result()

    def ask(self, version: int, *, anew: bool) -> Quorum:
        """Everyone who asks now; blocks until all living members do.

        Args:
            version: of this member's state, for the lighthouse's page only.
            anew: the last group broke; the lighthouse then counts a new quorum for all.
        """
        self._failures = self._failures + 1 if anew else 0
        started = said = time.monotonic()
        while True:
            try:
                return self._ask(max(0, version))
            except (RuntimeError, TimeoutError) as error:
                now = time.monotonic()
                if self._closed or now - started > self._patience_seconds:
                    raise UnreachableError(
                        f"the lighthouse at {self._address} did not answer for "
                        f"{now - started:.0f} s ({error}): check that it runs"
                    ) from error
                if now - said > SAY_SECONDS:
                    said = now
                    log.warning("no quorum for %.0f s: %s", now - started, error)
                time.sleep(0.1)

    def _ask(self, version: int) -> Quorum:
        if self._server is None:
            self._dial()
        answer = self._client._quorum(
            group_rank=0,
            step=version,
            checkpoint_metadata="",
            shrink_only=False,
            timeout=timedelta(seconds=ASK_SECONDS),
            commit_failures=self._failures,
            init_sync=False,
        )
        members = sorted(Member.of(replica_id) for replica_id in answer.replica_ids)
        return Quorum(answer.quorum_id, tuple(members))

    def _dial(self) -> None:
        from torchft.coordination import ManagerClient, ManagerServer

        host = self._me.address.rpartition(":")[0]
        limit = timedelta(seconds=ASK_SECONDS)
        self._server = ManagerServer(
            replica_id=self._me.id,
            lighthouse_addr=f"http://{self._address}",
            hostname=host,
            bind=f"{host}:0",
            store_addr=self._me.address,
            world_size=1,
            heartbeat_interval=HEARTBEAT_INTERVAL,
            connect_timeout=limit,
            quorum_retries=0,
        )
        self._client = ManagerClient(self._server.address(), connect_timeout=limit)

    def close(self) -> None:
        """No more heartbeats: the others go on without this member."""
        self._closed = True
        if self._server is not None:
            self._server.shutdown()
            self._server = None
