"""The site's pulse: heartbeats on a channel of their own, so that data never starves them."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import grpc

from loco.log import log_fields
from loco.metrics import WireMetrics
from loco.wire.access import Access, Link
from loco.wire.protocol import CHANNEL_OPTIONS, phase_name, wire_size
from loco.wire.refusal import refusal_of
from loco.wire.v1 import coordinator_pb2 as pb
from loco.wire.v1 import coordinator_pb2_grpc as pb_grpc

log = logging.getLogger("loco.worker")

M = TypeVar("M", pb.RoundReport, pb.Evaluation)

# Shorter stretches are switching between phases; they count in the sums and tell nobody anything.
_SHORTEST_SPAN_SECONDS = 1e-3
_MAX_PENDING = 1000  # spans and reports kept while nobody answers; ranks that never send keep these


@dataclass(frozen=True)
class _Span:
    phase: pb.SitePhase.ValueType
    round: int
    ended_at: float
    seconds: float


class Pulse:
    """What the leader tells of the site; other ranks keep one too and never send it."""

    def __init__(self) -> None:
        self._beat = pb.HeartbeatRequest()
        self._seconds: dict[pb.SitePhase.ValueType, float] = defaultdict(float)
        self._phase: pb.SitePhase.ValueType = pb.SITE_PHASE_SYNC
        self._phase_round = 0
        self._since = time.monotonic()
        self._spans: deque[_Span] = deque()
        self._num_earlier_spans = 0
        self._unanswered_since: float | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def edit(self) -> Iterator[pb.HeartbeatRequest]:
        """Change several fields of the next beat at once."""
        with self._lock:
            yield self._beat
            del self._beat.reports[:-_MAX_PENDING]
            del self._beat.evaluations[:-_MAX_PENDING]

    @contextmanager
    def phase(self, phase: pb.SitePhase.ValueType) -> Iterator[None]:
        """Account the time of a block to a phase."""
        before = self._switch(phase)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, phase: pb.SitePhase.ValueType) -> pb.SitePhase.ValueType:
        with self._lock:
            now = time.monotonic()
            before, seconds = self._phase, now - self._since
            self._seconds[before] += seconds
            if seconds >= _SHORTEST_SPAN_SECONDS:
                self._spans.append(_Span(before, self._phase_round, now, seconds))
                self._forget_spans(len(self._spans) - _MAX_PENDING)
            self._phase, self._since, self._phase_round = phase, now, self._beat.round
            log_fields(phase=phase_name(phase), round=self._beat.round)
            return before

    def _forget_spans(self, count: int) -> None:
        for _ in range(count):
            self._spans.popleft()
            self._num_earlier_spans += 1

    def start(
        self,
        address: str,
        access: Access,
        caller: pb.Caller,
        interval: float,
        wire: WireMetrics,
    ) -> None:
        """Beat every `interval` seconds until `stop`; one that beats goes on as this caller."""
        with self._lock:
            self._beat.caller.CopyFrom(caller)
        if self._thread is not None:
            return
        self._stop.clear()
        # A separate subchannel pool, or gRPC would share the data's connection.
        options = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        link = Link(address, access, options)
        self._thread = threading.Thread(
            target=self._run, args=(link, interval, wire), name="heartbeat", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Send a last beat and end."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._unanswered_since = None

    @property
    def silent_seconds(self) -> float:
        """How long the coordinator has owed the answer to a heartbeat.

        0 while it answers, and on ranks that send none. A line that swallows every packet shows
        here first: calls in progress notice it only when TCP or keepalive gives up.
        """
        since = self._unanswered_since
        return 0.0 if since is None else time.monotonic() - since

    def _run(self, link: Link, interval: float, wire: WireMetrics) -> None:
        while not self._stop.wait(interval):
            self._send(link.stub, wire)
        self._send(link.stub, wire)
        link.close()

    def _send(self, stub: pb_grpc.CoordinatorServiceStub, wire: WireMetrics) -> None:
        beat = self._snapshot()
        wire.count(beat.caller.site, "up", "control", wire_size(beat))
        if self._unanswered_since is None:
            self._unanswered_since = time.monotonic()
        try:
            answer = stub.Heartbeat(beat, timeout=10.0)
        except grpc.RpcError as error:
            # The main loop meets the same coordinator and decides; the pulse only tries again.
            log.debug("heartbeat: %s", error)
            if refusal_of(error) is not None:
                self._unanswered_since = None
            return
        self._unanswered_since = None
        wire.count(beat.caller.site, "down", "control", wire_size(answer))
        self._answered(beat)

    def _snapshot(self) -> pb.HeartbeatRequest:
        with self._lock:
            now = time.monotonic()
            beat = pb.HeartbeatRequest()
            beat.CopyFrom(self._beat)
            beat.phase = self._phase
            seconds = {**self._seconds}
            seconds[self._phase] = seconds.get(self._phase, 0.0) + now - self._since
            for phase, spent in seconds.items():
                beat.phase_seconds.add(phase=phase, seconds=spent)
            beat.num_earlier_spans = self._num_earlier_spans
            for span in self._spans:
                beat.spans.add(
                    phase=span.phase,
                    round=span.round,
                    ended_ago_seconds=now - span.ended_at,
                    seconds=span.seconds,
                )
            return beat

    def _answered(self, beat: pb.HeartbeatRequest) -> None:
        """What this beat carried has arrived."""
        with self._lock:
            arrived = beat.num_earlier_spans + len(beat.spans)
            self._forget_spans(arrived - self._num_earlier_spans)
            # New ones are appended, so those that were sent are the first ones.
            self._forget_first(self._beat.reports, beat.reports)
            self._forget_first(self._beat.evaluations, beat.evaluations)

    @staticmethod
    def _forget_first(kept: MutableSequence[M], sent: MutableSequence[M]) -> None:
        """Remove from `kept` what was sent, unless `edit` dropped it already."""
        while sent and kept and kept[0] in sent:
            del kept[0]
