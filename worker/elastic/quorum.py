"""Who is there: torchft's lighthouse, asked through torchft's manager.

Only membership is torchft's here. Its Python `Manager` would heal by unpickling what a peer sends,
raises for ever after one time-out, and throws steps away (`init_sync`); docs/torchft.md has the
list. So the servers below it are used directly.

A quorum's number means nothing by itself, because a restarted lighthouse begins at 1 again; what
counts is the set of members, and the name that they give themselves when they meet.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import logging
import re
import secrets
import select
import socket
import threading
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from loco.errors import ConfigError, UnreachableError
from loco.wire.protocol import split_address

log = logging.getLogger("loco.worker")

HEARTBEAT_INTERVAL = timedelta(milliseconds=100)
CONNECT_SECONDS = 2.0
ASK_SECONDS = 120.0  # one call; more than the lighthouse lets anyone wait (JOIN_TIMEOUT_MS)
LOOK_SECONDS = 0.2  # between two looks at whether the lighthouse still lives
AGAIN_SECONDS = 0.1
SAY_SECONDS = 5.0
_REPLICA_ID = re.compile(r"\d{6}@[^\s<>\"#/]+#[0-9a-f]{8}")  # as `Member.id` writes it
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

    A call is never given up while the lighthouse lives: the answer might just come, and who asks
    again waits for members that have theirs. On the other hand torchft's manager leaves a call for
    ever without an answer when the lighthouse dies; so a connection of our own tells that.

    On failure of the lighthouse it is waited for, which is said every 5 s, and UnreachableError is
    raised after `patience_seconds`.
    """

    def __init__(self, address: str, me: Member, *, patience_seconds: float) -> None:
        self._address = address
        self._me = me
        self._patience_seconds = patience_seconds
        self._server: Any = None
        self._client: Any = None
        self._line: socket.socket | None = None
        """Carries nothing; it breaks when the lighthouse does."""
        self._failures = 0
        self._version = 0
        self._call: Future[Quorum] | None = None
        self._dialled = 0.0
        self._heard_of: set[Member] = set()

    def ask(self, version: int, *, anew: bool) -> Quorum:
        """Everyone who asks now; blocks until all living members do.

        Args:
            version: of this member's state, for the lighthouse's page only.
            anew: the last group broke; the lighthouse then counts a new quorum for all.
        """
        self.ask_beside(version, anew=anew)
        quorum = self.answer()
        assert quorum is not None
        return quorum

    def ask_beside(self, version: int, *, anew: bool = False) -> None:
        """As `ask`, in a thread, while a step is computed; `answer` has what came of it."""
        assert self._call is None
        self._failures = self._failures + 1 if anew else 0
        self._version = max(0, version)
        self._call = self._start_call()

    def answer(self) -> Quorum | None:
        """What `ask_beside` found, once; blocks for it, raises as `ask`. None: nobody asked."""
        call, self._call = self._call, None
        if call is None:
            return None
        started = said = time.monotonic()
        why = ""
        while True:
            wait([call], LOOK_SECONDS)
            if call.done():
                try:
                    return call.result()
                except (RuntimeError, OSError) as error:
                    why = str(error)
            if call.done() or self._is_broken():
                self._hang_up()
                self._check_patience(time.monotonic() - started, why)
                time.sleep(AGAIN_SECONDS)
                call = self._start_call()
            if time.monotonic() - said > SAY_SECONDS:
                said = time.monotonic()
                why = why or "a rank that lives has not asked yet"
                log.warning("no quorum for %.0f s: %s", said - started, why)

    def _check_patience(self, seconds: float, why: str) -> None:
        if seconds > self._patience_seconds:
            raise UnreachableError(
                f"the lighthouse at {self._address} did not answer for {seconds:.0f} s "
                f"({why or 'it has gone'}): check that it runs"
            )

    def _start_call(self) -> Future[Quorum]:
        call = Future[Quorum]()

        def run() -> None:
            try:
                call.set_result(self._ask())
            except Exception as error:  # `answer` looks at it
                call.set_exception(error)

        threading.Thread(target=run, name="quorum", daemon=True).start()
        return call

    def _ask(self) -> Quorum:
        if self._server is None:
            self._dial()
        answer = self._client._quorum(
            group_rank=0,
            step=self._version,
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

        line = socket.create_connection(split_address(self._address), CONNECT_SECONDS)
        with contextlib.ExitStack() as dialled:
            dialled.callback(line.close)
            end_when_silent(line)
            host = self._me.address.rpartition(":")[0]
            limit = timedelta(seconds=CONNECT_SECONDS)
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
            dialled.pop_all()
        self._dialled = time.monotonic()
        self._line = line  # last: what is not dialled yet cannot be hung up

    @property
    def known_seconds(self) -> float:
        """How long this life of the lighthouse has known this member; 0 while it is away."""
        return 0.0 if self._line is None else time.monotonic() - self._dialled

    def everyone(self) -> list[Member]:
        """All of whom the lighthouse has had a heartbeat, dead ones too, sorted.

        A quorum leaves out who lives and does not ask. torchft has no call for this; but the page
        of its lighthouse names them. One that has been started again between two calls has
        forgotten them, and nobody notices: so whom it named before is named again.

        Raises:
            OSError: the page did not come, or does not name this member, who is there.
        """
        line = http.client.HTTPConnection(*split_address(self._address), timeout=CONNECT_SECONDS)
        try:
            line.request("GET", "/status")
            page = line.getresponse().read().decode(errors="replace")
        except http.client.HTTPException as error:
            raise OSError(f"the lighthouse's page did not come: {error}") from error
        finally:
            line.close()
        found = {Member.of(id_) for id_ in _REPLICA_ID.findall(page)}
        if self._me not in found:
            raise OSError("the lighthouse's page /status does not name this rank")
        self._heard_of |= found
        return sorted(self._heard_of)

    def _is_broken(self) -> bool:
        """Whether the lighthouse of the call that waits has died."""
        line = self._line
        if line is None or not select.select([line], [], [], 0)[0]:
            return False
        try:
            return not line.recv(4096)
        except OSError:
            return True

    def _hang_up(self) -> None:
        """The next call dials anew; one that still waits is not listened to any more."""
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._server is not None:
            self._server.shutdown()
            self._server = None

    def close(self) -> None:
        """No more heartbeats: the others go on without this member."""
        self._hang_up()


def end_when_silent(line: socket.socket) -> None:
    """Make a connection break within ten seconds when the other end's machine is gone."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):  # Linux
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
