"""Every Prometheus metric of loco, in one place. Labels are bounded: site, direction, kind, ...

`direction` is seen from the site: `up` is what it sends, `down` is what it receives. Bytes are
those of gRPC messages as handed to and received from the transport, at the end that exports them.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

KINDS = ("contribution", "update", "snapshot", "control")
DIRECTIONS = ("up", "down")

_ROUND_BUCKETS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000, 10_000)


class WireMetrics:
    """Bytes a site and direction; kept by the coordinator and by every rank alike."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._bytes = Counter(
            "loco_wire_bytes",
            "Bytes of gRPC messages between a site and the coordinator.",
            ("site", "direction", "kind"),
            registry=registry,
        )

    def count(self, site: str, direction: str, kind: str, num_bytes: int) -> None:
        """Add bytes that the transport has sent or received."""
        self._bytes.labels(site, direction, kind).inc(num_bytes)

    def total(self, site: str, direction: str) -> int:
        """Bytes so far, over all kinds."""
        return sum(int(self._child(site, direction, kind)) for kind in KINDS)

    def by_kind(self, site: str, direction: str) -> dict[str, int]:
        return {kind: int(self._child(site, direction, kind)) for kind in KINDS}

    def _child(self, site: str, direction: str, kind: str) -> float:
        return float(self._bytes.labels(site, direction, kind)._value.get())


class CoordinatorMetrics:
    """What the coordinator exports beside the wire."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.wire = WireMetrics(registry)
        self.rounds = Counter(
            "loco_rounds", "Outer rounds committed by this process.", registry=registry
        )
        self.round = Gauge(
            "loco_round", "Outer round that is open or being closed.", registry=registry
        )
        self.sites = Gauge(
            "loco_sites",
            "Sites registered (ever joined), alive, and included in the last round.",
            ("state",),
            registry=registry,
        )
        self.round_seconds = Histogram(
            "loco_round_seconds",
            "Duration of a round from opened to committed.",
            buckets=_ROUND_BUCKETS,
            registry=registry,
        )
        self.reduce_seconds = Histogram(
            "loco_reduce_seconds",
            "Duration of making an update from the contributions.",
            buckets=_ROUND_BUCKETS,
            registry=registry,
        )
        self.phase_seconds = Gauge(
            "loco_site_phase_seconds",
            "Seconds that a site spent in a phase since it joined, as it reports them.",
            ("site", "phase"),
            registry=registry,
        )
        self.tokens = Counter(
            "loco_tokens",
            "Tokens in contributions that were included.",
            ("site",),
            registry=registry,
        )
        self.train_bits_per_byte = Gauge(
            "loco_train_bits_per_byte",
            "Mean training loss of a site's last round.",
            ("site",),
            registry=registry,
        )
        self.validation_bits_per_byte = Gauge(
            "loco_validation_bits_per_byte",
            "Loss of theta on the held-out text, as last measured.",
            registry=registry,
        )
        self.compression_ratio = Gauge(
            "loco_compression_ratio",
            "Dense fp32 bytes over payload bytes, a contribution (up) or an update (down).",
            ("direction",),
            registry=registry,
        )
        self.rejections = Counter(
            "loco_rejections", "Requests refused.", ("reason",), registry=registry
        )
        self.resumed_bytes = Counter(
            "loco_upload_resumed_bytes",
            "Bytes of uploads that did not have to be sent again after a broken connection.",
            registry=registry,
        )
        self.digest_mismatches = Counter(
            "loco_digest_mismatches",
            "Times that a site reported another theta than the coordinator's.",
            ("site",),
            registry=registry,
        )
