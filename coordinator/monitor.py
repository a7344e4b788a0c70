"""What people see of the run: log lines, metrics, and the status document.

The status document is the one source for `loco status`, /status.json and the demo's table.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from coordinator.admission import waiting_for
from coordinator.events import (
    Event,
    RoundClosed,
    RoundCommitted,
    RoundOpened,
    Say,
    SiteJoined,
    SiteLeft,
    SiteLost,
)
from coordinator.state import Site, State
from coordinator.store import Store
from loco.metrics import DIRECTIONS, CoordinatorMetrics
from loco.wire.v1 import coordinator_pb2 as pb

log = logging.getLogger("loco.coordinator")


@dataclass
class Report:
    """What a site last said of itself."""

    phase: str = "sync"
    inner_steps: int = 0
    round: int = 0
    theta_digest: str = ""
    train_bits_per_byte: float | None = None
    phase_seconds: dict[str, float] = field(default_factory=dict)


class Monitor:
    """Listens to the engine and the service; never influences them."""

    def __init__(self, store: Store) -> None:
        self.registry = CollectorRegistry()
        self.metrics = CoordinatorMetrics(self.registry)
        self._store = store
        self._reports: dict[str, Report] = {}
        self._evaluations: dict[int, float] = {}  # round -> bits per byte
        self._opened_at = 0.0
        self._closed_at = 0.0
        self._values_up = 0  # in the round that is open
        self._value_bytes_up = 0
        self._bits_per_value_up: float | None = None  # of the last committed round
        self._started_at = time.time()

    # --- what happens ---------------------------------------------------------------------------

    def observe(self, event: Event | Say, state: State) -> None:
        """Called by the engine after every change of the state."""
        match event:
            case Say(message=message):
                log.warning(message)
            case SiteJoined():
                incarnation = state.sites[event.site].incarnation
                log.info(
                    "site %s joined with %d ranks (incarnation %d)",
                    event.site,
                    event.num_ranks,
                    incarnation,
                )
            case SiteLeft():
                log.info("site %s left: %s", event.site, event.reason)
            case SiteLost():
                log.warning("site %s was lost: nothing heard of it", event.site)
            case RoundOpened():
                self._opened_at = time.monotonic()
            case RoundClosed():
                self._closed_at = time.monotonic()
            case RoundCommitted():
                self._committed(event, state)
        self._count_sites(state)

    def _committed(self, event: RoundCommitted, state: State) -> None:
        now = time.monotonic()
        included = state.updates[event.round].included
        self.metrics.rounds.inc()
        self.metrics.round_seconds.observe(now - self._opened_at)
        self.metrics.reduce_seconds.observe(now - self._closed_at)
        dense = self._store.layout.dense_bytes
        ratio = self.metrics.compression_ratio
        ratio.labels("down").set(dense / max(1, event.update_bytes))
        ratio.labels("up").set(
            dense * len(included) / max(1, sum(c.size_bytes for c in included.values()))
        )
        if self._values_up:
            self._bits_per_value_up = 8 * self._value_bytes_up / self._values_up
            self._values_up = self._value_bytes_up = 0
        for name, have in included.items():
            self.metrics.tokens.labels(name).inc(have.tokens)
        log.info(
            "round %d committed: %s; update %d bytes, theta %s",
            event.round,
            ", ".join(included),
            event.update_bytes,
            event.theta_digest[:16],
        )

    def _count_sites(self, state: State) -> None:
        self.metrics.round.set(state.round)
        last = state.updates.get(state.round - 1)
        counts = {
            "registered": len(state.sites),
            "alive": sum(site.alive for site in state.sites.values()),
            "included": len(last.included) if last else 0,
        }
        for name, count in counts.items():
            self.metrics.sites.labels(name).set(count)

    def contribution(self, num_values: int, num_bytes: int) -> None:
        """A shard was decoded: so many values in so many payload bytes."""
        self._values_up += num_values
        self._value_bytes_up += num_bytes

    def resumed(self, num_bytes: int) -> None:
        """An upload went on behind bytes that had come before."""
        self.metrics.resumed_bytes.inc(num_bytes)

    def refused(self, reason: str) -> None:
        self.metrics.rejections.labels(reason).inc()

    def heartbeat(self, beat: pb.HeartbeatRequest) -> None:
        """Keep what a site says of itself."""
        site = beat.caller.site
        report = self._reports.setdefault(site, Report())
        report.phase = phase_name(beat.phase)
        report.inner_steps = beat.inner_steps
        report.round, report.theta_digest = beat.round, beat.theta_digest
        report.phase_seconds = {phase_name(p.phase): p.seconds for p in beat.phase_seconds}
        for phase, seconds in report.phase_seconds.items():
            self.metrics.phase_seconds.labels(site, phase).set(seconds)
        if beat.HasField("train_bits_per_byte"):
            report.train_bits_per_byte = beat.train_bits_per_byte
            self.metrics.train_bits_per_byte.labels(site).set(beat.train_bits_per_byte)
        if beat.HasField("evaluation"):
            self._evaluations[beat.evaluation.round] = beat.evaluation.bits_per_byte
            latest = self._evaluations[max(self._evaluations)]
            self.metrics.validation_bits_per_byte.set(latest)

    # --- what people see ------------------------------------------------------------------------

    def status(self, state: State) -> dict[str, Any]:
        """The status document; its keys are in docs/protocol.md."""
        last = state.updates.get(state.round - 1)
        return {
            "run_id": self._store.run_id,
            "round": state.round,
            "rounds": state.rules.rounds,
            "phase": state.phase,
            "waiting_for": waiting_for(state),
            "params": self._store.layout.num_parameters,
            "dense_bytes_per_round": self._store.layout.dense_bytes,
            "theta_digest": state.theta_digest,
            "uptime_seconds": round(time.time() - self._started_at, 1),
            "sites_registered": len(state.sites),
            "sites_alive": sum(site.alive for site in state.sites.values()),
            "sites_included": len(last.included) if last else 0,
            "update_bytes": last.size_bytes if last else 0,
            "bits_per_value_up": self._bits_per_value_up,
            "validation": [
                {"round": round_, "bits_per_byte": self._evaluations[round_]}
                for round_ in sorted(self._evaluations)
            ],
            "sites": [self._site(name, site, state) for name, site in sorted(state.sites.items())],
        }

    def _site(self, name: str, site: Site, state: State) -> dict[str, Any]:
        report = self._reports.get(name, Report())
        wire = self.metrics.wire
        last = state.updates.get(state.round - 1)
        return {
            "name": name,
            "status": site.status,
            "incarnation": site.incarnation,
            "ranks": site.num_ranks,
            "phase": report.phase,
            "round": report.round,
            "theta_digest": report.theta_digest,
            "inner_steps": report.inner_steps,
            "tokens": site.tokens_included,
            "rounds_included": site.rounds_included,
            "contribution_bytes": (
                last.included[name].size_bytes if last and name in last.included else 0
            ),
            "train_bits_per_byte": report.train_bits_per_byte,
            "phase_seconds": report.phase_seconds,
            **{f"bytes_{way}": wire.total(name, way) for way in DIRECTIONS},
            **{f"bytes_{way}_by_kind": wire.by_kind(name, way) for way in DIRECTIONS},
        }


def phase_name(phase: pb.SitePhase.ValueType) -> str:
    """`SITE_PHASE_COMPUTE` -> `compute`."""
    return pb.SitePhase.Name(phase).removeprefix("SITE_PHASE_").lower()
