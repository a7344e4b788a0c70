"""What one process life of a site has told in its heartbeats."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client import Counter

from loco.wire.protocol import phase_name
from loco.wire.v1 import coordinator_pb2 as pb

_TIMELINE_SPANS = 300  # a minute of rounds that take a second


@dataclass(frozen=True, kw_only=True)
class Span:
    """A stretch of time in one phase; Unix seconds on the coordinator's clock."""

    phase: str
    round: int
    started_at: float
    seconds: float


@dataclass
class Told:
    """The last word of a site, and how it spent its time lately."""

    incarnation: int
    baseline_known: bool
    """This coordinator process saw the site join: its sums began at 0. Else those of the first
    heartbeat are where the counters begin, or a restarted coordinator would show a leap."""
    phase: str = "sync"
    inner_steps: int = 0
    round: int = 0
    theta_digest: str = ""
    train_bits_per_byte: float | None = None
    in_site_bytes: int = 0
    ranks: int = 0
    """Ranks that the site was started with; 0: not told yet."""
    membership: pb.Membership = field(default_factory=pb.Membership)
    """Of a site whose ranks come and go; without members of any other."""
    ef_norm: float | None = None
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=_TIMELINE_SPANS))
    goodput: dict[str, float] = field(default_factory=dict)  # direction -> bytes a second
    link_rate: dict[str, float] = field(default_factory=dict)  # stated, or the best goodput
    _num_spans: int = 0
    _sums: dict[str, float] = field(default_factory=dict)
    _transfers: dict[str, tuple[float, float]] = field(default_factory=dict)  # seconds, bytes

    def take(self, beat: pb.HeartbeatRequest) -> None:
        """Keep what is plain."""
        self.phase = phase_name(beat.phase)
        self.inner_steps = beat.inner_steps
        self.round, self.theta_digest = beat.round, beat.theta_digest
        self.phase_seconds = {phase_name(p.phase): p.seconds for p in beat.phase_seconds}
        if beat.HasField("train_bits_per_byte"):
            self.train_bits_per_byte = beat.train_bits_per_byte
        self.in_site_bytes = beat.totals.in_site_bytes
        self.ranks = beat.ranks
        self.membership.CopyFrom(beat.membership)
        if beat.reports:
            self.ef_norm = beat.reports[-1].ef_norm

    def new_spans(self, beat: pb.HeartbeatRequest, now: float) -> list[Span]:
        """The spans that were not told before; `now` in Unix seconds."""
        new = [
            Span(
                phase=phase_name(span.phase),
                round=span.round,
                started_at=now - span.ended_ago_seconds - span.seconds,
                seconds=span.seconds,
            )
            for number, span in enumerate(beat.spans, beat.num_earlier_spans)
            if number >= self._num_spans
        ]
        self._num_spans = max(self._num_spans, beat.num_earlier_spans + len(beat.spans))
        self.spans.extend(new)
        return new

    def grow(self, counter: Counter, name: str, value: float) -> None:
        """Raise `counter` by as much as the site's sum `name` has grown since the last call."""
        before = self._sums.get(name, 0.0 if self.baseline_known else value)
        counter.inc(max(0.0, value - before))
        self._sums[name] = value

    def measure_link(self, direction: str, seconds: float, num_bytes: float) -> None:
        """Goodput since the last finished transfer: sums of transfer time and payload bytes."""
        before_seconds, before_bytes = self._transfers.get(direction, (0.0, 0.0))
        if not self.baseline_known and direction not in self._transfers:
            before_seconds, before_bytes = seconds, num_bytes
        self._transfers[direction] = (seconds, num_bytes)
        if seconds > before_seconds and num_bytes > before_bytes:
            rate = (num_bytes - before_bytes) / (seconds - before_seconds)
            self.goodput[direction] = rate
            self.link_rate[direction] = max(rate, self.link_rate.get(direction, 0.0))
