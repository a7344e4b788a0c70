"""The site's side of the wire: one rank's conversation with the coordinator.

On failure: while the coordinator is away every call is tried again, with growing pauses and a log
line that says for how long; after `patience` seconds without an answer it raises UnreachableError.
What the coordinator refuses raises RefusedError at once, with its reason.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import grpc
import numpy as np
from google.protobuf.message import Message

from loco.digest import bytes_digest
from loco.errors import LocoError, UnreachableError
from loco.layout import Layout
from loco.metrics import WireMetrics
from loco.wire.access import Access, Link
from loco.wire.blocks import is_sound, make_block
from loco.wire.protocol import (
    BLOCK_BYTES,
    INLINE_BYTES,
    PROTOCOL_VERSION,
    sizes_by_kind,
    wire_size,
)
from loco.wire.refusal import describe
from loco.wire.v1 import coordinator_pb2 as pb
from loco.wire.v1 import coordinator_pb2_grpc as pb_grpc
from worker.again import DamagedBlockError, check_hope
from worker.lanes import Lanes, Moved, lanes_a_rank, num_lanes
from worker.signed import signed_fact
from worker.stall import Motion, StalledError, Watch
from worker.throttle import Throttle

if TYPE_CHECKING:
    from loco.chain import Fact

log = logging.getLogger("loco.worker")

T = TypeVar("T")
MessageT = TypeVar("MessageT", bound=Message)

CALL_SECONDS = 30.0
POLL_SECONDS = 20.0
ANSWER_SECONDS = 140.0  # a poll, and an update that comes with its answer at 35 kbit/s
MAX_PAUSE_SECONDS = 5.0
SAY_SECONDS = 5.0  # between lines about a coordinator that is away


class _Stream(Protocol):
    """A download in progress: the stubs' types know only that it is an iterator."""

    def __iter__(self) -> Iterator[pb.PullResponse | pb.SnapshotResponse]: ...

    def cancel(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class Have:
    """The theta that a site brings along."""

    round: int
    theta_digest: str


@dataclass(frozen=True)
class _Asked:
    """A question whose answer is under way."""

    have_round: int
    theta_digest: str
    call: grpc.Future[pb.WaitRoundResponse]


class Session:
    """Calls of one rank; the leader also joins, waits, beats and leaves."""

    def __init__(
        self,
        address: str,
        site: str,
        patience: float,
        wire: WireMetrics,
        access: Access | None = None,
        bytes_per_second: float | None = None,
        num_ranks: int = 1,
    ) -> None:
        """`access` defaults to plaintext on loopback; `bytes_per_second` bounds the transfers of
        each direction; `num_ranks` do the same at once."""
        self.address = address
        self.access = access or Access()
        self._site = site
        self._patience = patience
        self.wire = wire
        self._lanes = Lanes(address, self.access, lanes_a_rank(num_ranks))
        self._num_ranks = num_ranks
        self._begun: dict[tuple[int, int, int, bytes], Future[pb.PushResponse]] = {}
        self._counting = threading.Lock()
        self.up, self.down = Moved(), Moved()
        self._up, self._down = Throttle(bytes_per_second), Throttle(bytes_per_second)
        self._answered = False
        self._instance = secrets.token_hex(8)
        self._random = Random()  # the global one may be a user's, who counts on its state
        self._away_since: float | None = None
        self._said = 0.0
        self._up_motion = Motion()
        self._closed = False
        self._asked: _Asked | None = None
        self.caller = pb.Caller()
        self.retries = 0
        """Calls tried again because the coordinator did not answer."""
        self.resumed_bytes = 0
        """Bytes that had come when a connection broke, and were not moved again."""

    def close(self) -> None:
        """End all calls; those of other threads raise."""
        self._closed = True
        self._lanes.close()

    @property
    def _stub(self) -> pb_grpc.CoordinatorServiceStub:
        return self._lanes.first.stub

    # --- the leader -----------------------------------------------------------------------------

    def get_run(self) -> pb.GetRunResponse:
        """The run and its config."""
        request = pb.GetRunRequest(protocol_version=PROTOCOL_VERSION)
        return self._call(lambda stub: stub.GetRun, request)

    def join(
        self, run: pb.GetRunResponse, layout: Layout, num_shards: int, have: Have | None
    ) -> pb.JoinResponse:
        """Enter the run; `have` tells of the theta in the site's checkpoint."""
        request = pb.JoinRequest(
            protocol_version=PROTOCOL_VERSION,
            run_id=run.run_id,
            site=self._site,
            instance=self._instance,
            num_shards=num_shards,
            config_hash=run.config_hash,
            layout_fingerprint=layout.fingerprint,
            layout=[pb.TensorSpec(name=p.name, shape=p.shape) for p in layout.parameters],
            have_round=have.round if have else None,
            have_digest=have.theta_digest if have else "",
        )
        return self._call(lambda stub: stub.Join, request)

    def ask_ahead(self, have_round: int, theta_digest: str) -> None:
        """Ask already for what comes after the contribution that is about to be pushed.

        `next_directive` then has its answer a round trip earlier. To be forgotten if the push does
        not end well.
        """
        self.forget_directive()
        request = self._question(have_round, theta_digest)
        request.contributing = True
        call = self._stub.WaitRound.future(self._sent(request, "control"), timeout=ANSWER_SECONDS)
        self._asked = _Asked(have_round, theta_digest, call)

    def forget_directive(self) -> None:
        """What `ask_ahead` asked for is not wanted any more."""
        if self._asked is not None:
            self._asked.call.cancel()
            self._asked = None

    def next_directive(self, have_round: int, theta_digest: str) -> pb.WaitRoundResponse:
        """Wait until the site may go on; says in the log for what it waits."""
        request = self._question(have_round, theta_digest)
        started = time.monotonic()
        while True:
            response = self._asked_ahead(have_round, theta_digest) or self._call(
                lambda stub: stub.WaitRound, request, timeout=ANSWER_SECONDS
            )
            if response.directive != pb.DIRECTIVE_WAIT:
                return response
            waited = time.monotonic() - started
            log.info("waiting for %.0f s: %s", waited, response.message)

    def _question(self, have_round: int, theta_digest: str) -> pb.WaitRoundRequest:
        return pb.WaitRoundRequest(
            caller=self.caller,
            have_round=have_round,
            theta_digest=theta_digest,
            timeout_seconds=POLL_SECONDS,
        )

    def _asked_ahead(self, have_round: int, theta_digest: str) -> pb.WaitRoundResponse | None:
        """The answer to `ask_ahead`; None if there is none to this question."""
        asked, self._asked = self._asked, None
        if asked is None:
            return None
        if (asked.have_round, asked.theta_digest) != (have_round, theta_digest):
            asked.call.cancel()
            return None
        try:
            response = asked.call.result()
        except grpc.RpcError as error:  # asked again, that call decides what it means
            log.debug("no answer ahead: %s", describe(error))
            return None
        self._received(response, "control")
        return response

    def leave(self, reason: str) -> None:
        """Say goodbye; a coordinator that does not answer now is not waited for."""
        request = pb.LeaveRequest(caller=self.caller, reason=reason)
        try:
            self._stub.Leave(request, timeout=2.0)
        except grpc.RpcError as error:
            log.info("left without a goodbye: %s", describe(error))

    # --- every rank -----------------------------------------------------------------------------

    def begin_push(self, header: pb.PushHeader, body: bytes) -> None:
        """Begin to upload one of several shards, beside others; `push` of it waits for its end."""
        key = self._name(header, body)
        self._begun = {k: push for k, push in self._begun.items() if k[0] >= header.round}
        before = self._begun.get(key)
        if before is None or (before.done() and before.exception() is not None):
            self._begun[key] = self._lanes.start(
                lambda link, sent: self._push(link, header, body, sent)
            )

    def push(self, header: pb.PushHeader, body: bytes) -> pb.PushResponse:
        """Upload one shard; safe to repeat, and goes on where a broken stream stopped."""
        begun = self._begun.pop(self._name(header, body), None)
        return self._push(self._lanes.first, header, body) if begun is None else begun.result()

    def forget_pushes(self) -> None:
        """What `begin_push` began is not wanted any more; what is on its way goes to its end."""
        for push in self._begun.values():
            push.cancel()
        self._begun.clear()

    def _name(self, header: pb.PushHeader, body: bytes) -> tuple[int, int, int, bytes]:
        """Tells uploads apart: a coordinator that has lost one asks another incarnation for it."""
        return header.round, self.caller.incarnation, header.shard, bytes_digest(body)

    def _push(
        self,
        link: Link,
        header: pb.PushHeader,
        body: bytes,
        sent: Callable[[], None] = lambda: None,
    ) -> pb.PushResponse:
        header.caller.CopyFrom(self.caller)
        header.size_bytes = len(body)
        header.digest = bytes_digest(body)
        fresh = True

        def push_once() -> pb.PushResponse:
            nonlocal fresh
            header.offset = 0 if fresh else self._push_offset(header)
            self._resumed(header.offset)
            fresh = False
            with Watch(self._up_motion) as watch:
                messages = self._push_messages(header, body, watch, sent)
                call = link.stub.Push.future(messages)
                watch.start(call.cancel)
                response: pb.PushResponse = call.result()
            return response

        with self.up.moving(len(body)):
            response = self._patiently(push_once)
        self._received(response, "control")
        return response

    def _push_offset(self, header: pb.PushHeader) -> int:
        request = self._sent(pb.PushOffsetRequest(header=header), "control")
        answer = self._stub.PushOffset(request, timeout=CALL_SECONDS)
        self._received(answer, "control")
        if answer.offset > header.offset:
            self._away_since = None  # it breaks again and again, but moves
        return answer.offset

    def _push_messages(
        self, header: pb.PushHeader, body: bytes, watch: Watch, sent: Callable[[], None]
    ) -> Iterator[pb.PushRequest]:
        left = len(body) - header.offset
        if left <= INLINE_BYTES:  # with the header: half the messages of a small shard
            self._up.take(left)
            block = make_block(body[header.offset :])
            yield self._sent(pb.PushRequest(header=header, block=block), "contribution")
            sent()
            return
        yield self._sent(pb.PushRequest(header=header), "contribution")
        for start in range(header.offset, len(body), BLOCK_BYTES):
            watch.moved()
            data = body[start : start + BLOCK_BYTES]
            self._up.take(len(data))
            yield self._sent(pb.PushRequest(block=make_block(data)), "contribution")
        sent()

    def pull(self, round_: int, span: range) -> memoryview:
        """These bytes of the update that ends a round."""

        def ask(link: Link, part: range) -> _Stream:
            request = pb.PullRequest(
                caller=self.caller, round=round_, offset=part.start, length=len(part)
            )
            return cast(_Stream, link.stub.Pull(self._sent(request, "control")))

        return self._download(ask, span, "update")

    def snapshot(self, round_: int, span: range) -> memoryview:
        """These bytes of theta at a snapshot's round."""

        def ask(link: Link, part: range) -> _Stream:
            request = pb.SnapshotRequest(
                caller=self.caller, round=round_, offset=part.start, length=len(part)
            )
            return cast(_Stream, link.stub.Snapshot(self._sent(request, "control")))

        return self._download(ask, span, "snapshot")

    def check_update(self, entry: pb.SignedEntry, round_: int, update: bytes | memoryview) -> None:
        """LocoError if these are not the bytes that the coordinator has signed."""
        fact = self._signed_fact(entry, "update", round_)
        if fact is not None and fact.sha256 != hashlib.sha256(update).hexdigest():
            raise LocoError(f"the update of round {round_} is not what the coordinator has signed")

    def check_snapshot(self, entry: pb.SignedEntry, round_: int, theta_digest: str) -> None:
        """LocoError if this is not the digest of theta that the coordinator has signed."""
        fact = self._signed_fact(entry, "snapshot", round_)
        if fact is not None and fact.theta_digest != theta_digest:
            raise LocoError(
                f"the snapshot of round {round_} is not what the coordinator has signed"
            )

    def _signed_fact(self, entry: pb.SignedEntry, kind: str, round_: int) -> Fact | None:
        """None in plaintext, where nothing is signed."""
        authority = self._lanes.first.authority
        if authority is None:
            return None
        return signed_fact(entry, authority, run_id=self.caller.run_id, kind=kind, round_=round_)

    # --- plumbing -------------------------------------------------------------------------------

    def _download(
        self, ask: Callable[[Link, range], _Stream], span: range, kind: str
    ) -> memoryview:
        """Bytes of `span`, in ranges side by side where it is long."""
        # Not zeroed before: 134 MB would begin 50 ms later.
        data = np.empty(len(span), np.uint8).data
        motion = Motion()

        def fetch(link: Link, part: range) -> None:
            here = data[part.start - span.start : part.stop - span.start]
            self._download_range(link, ask, part, here, kind, motion)

        self._lanes.share(span, num_lanes(len(span), self._num_ranks), fetch)
        return data.toreadonly()

    def _download_range(
        self,
        link: Link,
        ask: Callable[[Link, range], _Stream],
        part: range,
        data: memoryview,
        kind: str,
        motion: Motion,
    ) -> None:
        """Fill `data`; after a broken connection it goes on where it stopped."""
        come = 0

        def go_on() -> None:
            nonlocal come
            if come == len(part):
                return
            self._resumed(come)
            with Watch(motion) as watch:
                stream = ask(link, part[come:])
                watch.start(stream.cancel)
                for response in stream:
                    watch.moved()
                    self._received(response, kind)
                    self._away_since = None
                    block = response.block.data
                    if not is_sound(response.block) or come + len(block) > len(part):
                        raise DamagedBlockError(f"a block of the {kind} was damaged on the way")
                    data[come : come + len(block)] = block
                    come += len(block)
                    self._down.take(len(block))  # what nobody reads is not sent
            if come < len(part):
                raise DamagedBlockError(f"{len(part) - come} bytes of the {kind} did not come")

        with self.down.moving(len(part)):
            self._patiently(go_on)

    def _call(
        self,
        method: Callable[[pb_grpc.CoordinatorServiceStub], Callable[..., T]],
        request: Message,
        *,
        timeout: float = CALL_SECONDS,
    ) -> T:
        def attempt() -> T:  # each on the connection that is current then
            return method(self._stub)(self._sent(request, "control"), timeout=timeout)

        response = self._patiently(attempt)
        assert isinstance(response, Message)
        self._received(response, "control")
        return response

    def _patiently(self, attempt: Callable[[], T]) -> T:
        pause = 0.1
        while True:
            try:
                result = attempt()
            except ValueError:
                if not self._closed:
                    raise
                raise UnreachableError("the session is closed") from None  # gRPC's way to say so
            except (grpc.RpcError, DamagedBlockError, StalledError) as error:
                self._check_hope(error)
                with self._counting:
                    self.retries += 1
                time.sleep(pause * self._random.uniform(0.5, 1.0))
                pause = min(2 * pause, MAX_PAUSE_SECONDS)
            else:
                self._away_since = None
                self._answered = True
                return result

    @property
    def away_seconds(self) -> float:
        """How long the coordinator has not answered; 0 while it does."""
        since = self._away_since
        return 0.0 if since is None else time.monotonic() - since

    def _resumed(self, num_bytes: int) -> None:
        with self._counting:
            self.resumed_bytes += num_bytes

    def _check_hope(self, error: grpc.RpcError | DamagedBlockError | StalledError) -> None:
        """Return where another attempt may help; raise where it cannot, or patience is over."""
        if isinstance(error, DamagedBlockError):
            log.warning("%s; fetching it again", error)
        elif isinstance(error, StalledError):
            self._check_patience(str(error))
        else:
            answered = check_hope(error, self.address, closed=self._closed)
            self._check_patience(describe(error), unanswered=not answered)

    def _check_credentials(self) -> str | None:
        """Why the two sides do not accept each other, if that is it: a site that was never answered
        ends with it, a later one waits, for whoever renews a certificate."""
        problem = self._lanes.first.problem()
        if problem is not None and not self._answered:
            raise problem
        return None if problem is None else str(problem)

    def _check_patience(self, why: str, *, unanswered: bool = False) -> None:
        if self._away_since is None:
            self._away_since = self._said = time.monotonic()
            if unanswered and not self._answered:
                self._check_credentials()
        away = self.away_seconds
        if away >= self._patience:
            raise UnreachableError(
                f"the coordinator at {self.address} did not answer for {away:.0f} s "
                f"({why}): check the address and that it runs, or give a longer --patience"
            ) from None
        if time.monotonic() - self._said >= SAY_SECONDS:
            self._said = time.monotonic()
            why = (self._check_credentials() if unanswered else None) or why
            log.warning(
                "coordinator %s away for %.0f s, giving up in %.0f s: %s",
                self.address,
                away,
                self._patience - away,
                why,
            )

    def _sent(self, message: MessageT, kind: str) -> MessageT:
        self.wire.count(self._site, "up", kind, wire_size(message))
        return message

    def _received(self, message: Message, kind: str) -> None:
        sizes = {kind: wire_size(message)} if kind != "control" else sizes_by_kind(message)
        for kind_, size in sizes.items():
            self.wire.count(self._site, "down", kind_, size)
