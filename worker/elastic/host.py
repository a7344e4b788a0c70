"""What a member answers to other members: ping, alarm, its state, and the meeting that it hosts.

The member that sorts first in a quorum hosts the meeting of that quorum. All others come to it with
a Hello, get the Plan, carry it out, say that they are ready with the digest of their state, and are
told to go, or to meet again. Who is late or has another state is left out; nobody waits for ever.

Listens on the site's private network, without authentication, as torchft's lighthouse does.
"""

from __future__ import annotations

import logging
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter
from torch import Tensor

from loco.errors import LocoError
from loco.wire.protocol import split_address
from worker.elastic.meeting import Hello, Plan, decide
from worker.elastic.quorum import Member, Quorum
from worker.elastic.wire import WireError, receive_frame, send_frame, send_tensor

log = logging.getLogger("loco.worker")

CONNECT_SECONDS = 2.0
MEET_SECONDS = 10.0  # members of one quorum come within milliseconds, or have died meanwhile
LOOK_SECONDS = 0.2  # between two looks at whether those who have not come are alive

Source = Callable[[], tuple[dict[str, Any], dict[str, Tensor]]]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a site asks of its meetings."""

    target_size: int
    """Ranks of the whole site; it begins at once when all are there."""
    start_seconds: float
    """How long a site without any state waits for the others before it begins with fewer."""
    heal_seconds: float
    """How long those who are there wait for a new member to take their state."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a meeting ended."""

    again: str = ""
    """Why all meet again; empty: `order` goes on."""
    order: tuple[str, ...] = ()
    """Ids of those who go on, in order of rank; who is not among them is left out."""
    healed_bytes: int = 0
    """What new members took."""
    out: tuple[str, ...] = ()
    """With `again`: members whose state is not that of the others; they must not come back."""


class _Meeting:
    """One meeting; each member's connection has a thread that calls it."""

    def __init__(self, quorum: Quorum, rules: Rules) -> None:
        self._members = {member.id: member for member in quorum.members}
        self._rules = rules
        self._hellos: dict[str, Hello] = {}
        self._ready: dict[str, str] = {}
        self._healed_bytes = 0
        self._failed: dict[str, str] = {}
        self._plan: Plan | None = None
        self._verdict: Verdict | None = None
        self._news = threading.Condition()

    @property
    def is_over(self) -> bool:
        return self._verdict is not None

    def arrive(self, hello: Hello) -> Plan | Verdict:
        """The plan once all are here, or why there is none."""
        until = time.monotonic() + MEET_SECONDS
        with self._news:
            watches = not self._hellos
            self._hellos[hello.id] = hello
            self._news.notify_all()
            while self._verdict is None and len(self._hellos) < len(self._members):
                self._news.wait(LOOK_SECONDS)
                if watches:
                    self._look_for_the_missing(until)
            if self._verdict is None and self._plan is None:
                self._conclude()
            self._news.notify_all()
            return self._verdict or self._plan  # type: ignore[return-value]  # one of them is set

    def _look_for_the_missing(self, until: float) -> None:
        missing = [m for id_, m in self._members.items() if id_ not in self._hellos]
        for member in missing:
            if not listens(member):
                self._verdict = Verdict(again=f"{member} is gone")
        if missing and time.monotonic() > until:
            why = f"{missing[0]} did not come within {MEET_SECONDS:.0f} s"
            self._verdict = Verdict(again=why)

    def _conclude(self) -> None:
        plan = decide(list(self._hellos.values()), secrets.token_hex(8))
        waiting = max(hello.waiting_seconds for hello in self._hellos.values())
        here, target = len(self._members), self._rules.target_size
        if plan.begins and here < target and waiting < self._rules.start_seconds:
            why = f"{here} of {target} ranks are here, and none has a state"
            self._verdict = Verdict(again=why)
        else:
            self._plan = plan

    def ready(self, id_: str, digest: str, failure: str, healed_bytes: int) -> Verdict:
        """A member has carried out the plan, or failed to; blocks until all have said so."""
        assert self._plan is not None
        until = time.monotonic() + (self._rules.heal_seconds if self._plan.heal else MEET_SECONDS)
        with self._news:
            if failure:
                self._failed[id_] = failure
            else:
                self._ready[id_] = digest
                self._healed_bytes += healed_bytes
            self._news.notify_all()
            while self._verdict is None and not self._all_said():
                self._news.wait(LOOK_SECONDS)
                if time.monotonic() > until:
                    self._leave_out_the_late()
            self._verdict = self._verdict or self._judge(self._plan)
            self._news.notify_all()
            return self._verdict

    def lost(self, id_: str) -> None:
        """A member's connection broke before it said anything."""
        with self._news:
            self._failed.setdefault(id_, "it is gone")
            self._news.notify_all()

    def _all_said(self) -> bool:
        assert self._plan is not None
        return all(id_ in self._ready or id_ in self._failed for id_ in self._plan.order)

    def _leave_out_the_late(self) -> None:
        assert self._plan is not None
        for id_ in self._plan.order:
            if id_ not in self._ready:
                self._failed.setdefault(id_, "it took too long")

    def _judge(self, plan: Plan) -> Verdict:
        """A new member that failed is left out; an old one that did is a matter of a new quorum."""
        old = [id_ for id_ in plan.order if id_ not in plan.heal]
        for id_ in old:
            if id_ in self._failed:
                return Verdict(again=f"{self._members[id_]}: {self._failed[id_]}")
        digests = [self._ready[id_] for id_ in old]
        agreed = max(digests, key=digests.count)
        astray = tuple(id_ for id_ in old if self._ready[id_] != agreed)
        if astray:
            names = ", ".join(str(self._members[id_]) for id_ in astray)
            return Verdict(again=f"the state of {names} is not that of the others", out=astray)
        order = tuple(id_ for id_ in plan.order if self._ready.get(id_) == agreed)
        return Verdict(order=order, healed_bytes=self._healed_bytes)


class Host:
    """A member's server; every connection has a thread.

    `source`, `beside`, `has_state` and `on_alarm` are set by the member; without a source no state
    is given.
    """

    def __init__(self, interface: str, rules: Rules) -> None:
        self._rules = rules
        self._meetings: dict[tuple[int, tuple[str, ...]], _Meeting] = {}
        self._lock = threading.Lock()
        self.source: Source | None = None
        """All of the state; None while it is not settled."""
        self.beside: Source | None = None
        """What can be fetched while this member trains."""
        self.is_busy = False
        """It trains, and comes to no meeting before its step is over."""
        self.has_state: Callable[[], bool] = lambda: False
        """Whether it has what others could go on from."""
        self.on_alarm: Callable[[str, str], None] = lambda _name, _why: None
        self._server = _Server((interface, 0), self._talk)
        self.address = f"{interface}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, name="members", daemon=True).start()

    def close(self) -> None:
        """Answer nobody any more."""
        self._server.shutdown()
        self._server.server_close()

    def _talk(self, peer: socket.socket) -> None:
        while True:
            message = receive_frame(peer)
            match message["kind"]:
                case "ping":
                    send_frame(peer, {"busy": self.is_busy, "state": self.has_state()})
                case "alarm":
                    self.on_alarm(message["group"], message["why"])
                    send_frame(peer, {})
                case "state":
                    self._give(peer, self.source, message["known"])
                case "beside":
                    self._give(peer, self.beside, {})
                case "hello":
                    self._host(peer, message)
                case other:
                    raise WireError(f"a member asks for {other!r}, which nobody knows")

    def _give(
        self, peer: socket.socket, source: Source | None, known: dict[str, list[str]]
    ) -> None:
        if source is None:
            send_frame(peer, {"refused": "this member has no settled state now"})
            return
        header, tensors = source()
        send_frame(peer, header)
        for name, tensor in tensors.items():
            send_tensor(peer, tensor, known.get(name, ()))

    def _host(self, peer: socket.socket, message: dict[str, Any]) -> None:
        hello = TypeAdapter(Hello).validate_python(message["hello"])
        meeting = self._meeting(message["number"], tuple(message["members"]))
        arrived = meeting.arrive(hello)
        if isinstance(arrived, Verdict):
            send_frame(peer, {"verdict": asdict(arrived)})
            return
        try:
            send_frame(peer, {"plan": asdict(arrived)})
            said = receive_frame(peer)
        except OSError:
            meeting.lost(hello.id)
            raise
        verdict = meeting.ready(hello.id, said["digest"], said["failure"], said["healed"])
        send_frame(peer, {"verdict": asdict(verdict)})

    def _meeting(self, number: int, ids: tuple[str, ...]) -> _Meeting:
        key = (number, ids)
        with self._lock:
            if key not in self._meetings or self._meetings[key].is_over:
                members = tuple(Member.of(id_) for id_ in ids)
                self._meetings[key] = _Meeting(Quorum(number, members), self._rules)
                for old in [k for k, meeting in self._meetings.items() if meeting.is_over]:
                    del self._meetings[old]
            return self._meetings[key]


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, address: tuple[str, int], talk: Callable[[socket.socket], None]) -> None:
        self._talk = talk
        super().__init__(address, socketserver.BaseRequestHandler)

    def finish_request(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:
            self._talk(request)
        except OSError:
            pass  # the other end has gone, which is how every conversation ends
        except (LocoError, ValueError, KeyError) as error:
            log.warning("a member's request is not understood: %s", error)


def dial(member: Member, seconds: float | None) -> socket.socket:
    """A connection to a member; `seconds` is the limit of each later send and receive."""
    connection = socket.create_connection(split_address(member.address), CONNECT_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(seconds)
    return connection


def listens(member: Member) -> bool:
    """Whether the member's process exists; a stopped one does."""
    try:
        dial(member, None).close()
    except OSError:
        return False
    return True


def answers(member: Member, seconds: float) -> bool:
    """Whether the member answers a ping."""
    return says_of_itself(member, seconds) is not None


def is_busy(member: Member, seconds: float) -> bool:
    """Whether the member is in a step; one that does not answer is not."""
    answer = says_of_itself(member, seconds)
    return answer is not None and answer["busy"]


def says_of_itself(member: Member, seconds: float) -> dict[str, Any] | None:
    """Whether it is `busy` in a group, and has a `state`; None: it does not answer."""
    try:
        with dial(member, seconds) as connection:
            send_frame(connection, {"kind": "ping"})
            return receive_frame(connection)
    except (OSError, WireError):
        return None


def raise_alarm(members: Sequence[Member], group: str, why: str) -> None:
    """Tell members that their group is broken, each in a thread; who is dead need not know."""

    def tell(member: Member) -> None:
        with suppress(OSError, WireError), dial(member, CONNECT_SECONDS) as connection:
            send_frame(connection, {"kind": "alarm", "group": group, "why": why})
            receive_frame(connection)

    for member in members:
        threading.Thread(target=tell, args=(member,), daemon=True).start()
