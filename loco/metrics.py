"""Every Prometheus metric of loco, in one place; docs/metrics.md is generated from here.

Labels are bounded: site, direction, kind, reason, phase, state; never a round or a session. The
series of a site disappear when it has departed (`Catalogue.forget_site`). `direction` is seen from
the site: `up` is what it sends, `down` what it receives. Sites behind NAT cannot be scraped, so
their figures travel with heartbeats and the coordinator exports them by site.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.metrics import MetricWrapperBase

KINDS = ("contribution", "update", "snapshot", "control")
TRANSFERS = (
    ("up", "contribution"),
    ("down", "update"),
    ("down", "snapshot"),
    ("up", "control"),
    ("down", "control"),
)
"""Directions and kinds of what travels."""
DIRECTIONS = ("up", "down")
PHASES = ("sync", "compute", "encode", "push", "wait", "pull", "apply", "eval")
STATES = ("registered", "alive", "included", "lost", "quarantined", "evicted")
ORDERS = ("set", "pause", "drain", "resume", "evict", "readmit", "snapshot")

_SECONDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000, 10_000)

MetricT = TypeVar("MetricT", bound=MetricWrapperBase)


@dataclass(frozen=True, kw_only=True)
class Description:
    """One line of docs/metrics.md."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


class Catalogue:
    """Registers metrics, and remembers them: to describe all, and to forget a site in all."""

    def __init__(self, registry: CollectorRegistry) -> None:
        # A series more for each counter, which nobody reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry
        self._of_sites: list[MetricWrapperBase] = []
        self.described: list[Description] = []

    def counter(self, name: str, help_: str, *labels: str) -> Counter:
        """`name` ends in _total, as it is exported."""
        return self._add(Counter(name, help_, labels, registry=self._registry), name, help_, labels)

    def gauge(self, name: str, help_: str, *labels: str) -> Gauge:
        return self._add(Gauge(name, help_, labels, registry=self._registry), name, help_, labels)

    def histogram(self, name: str, help_: str, *labels: str) -> Histogram:
        """Of seconds."""
        metric = Histogram(name, help_, labels, buckets=_SECONDS, registry=self._registry)
        return self._add(metric, name, help_, labels)

    def _add(self, metric: MetricT, name: str, help_: str, labels: tuple[str, ...]) -> MetricT:
        kind = type(metric).__name__.lower()
        self.described.append(Description(name=name, kind=kind, labels=labels, help=help_))
        if "site" in labels:
            self._of_sites.append(metric)
        return metric

    def forget_site(self, site: str) -> None:
        """Remove every series of a site."""
        for metric in self._of_sites:
            metric.remove_by_labels({"site": site})


class WireMetrics:
    """What every end of the wire exports: the coordinator for all sites, a rank for its own."""

    def __init__(self, catalogue: Catalogue) -> None:
        build = catalogue.gauge("loco_build_info", "1, with the version of loco.", "version")
        build.labels(version("loco")).set(1)
        self._bytes = catalogue.counter(
            "loco_wire_bytes_total",
            "Bytes of gRPC messages between a site and the coordinator, as handed to and received "
            "from the transport at the end that exports them.",
            "site",
            "direction",
            "kind",
        )

    def begin(self, site: str, num_bytes: Mapping[tuple[str, str, str], int]) -> None:
        """Show a site's series, which are not there yet, before it sends anything.

        They go on from `num_bytes` (by site, direction and kind): a counter that begins anew at
        each restart loses what nobody has scraped.
        """
        for direction, kind in TRANSFERS:
            self._bytes.labels(site, direction, kind).inc(num_bytes.get((site, direction, kind), 0))

    def count(self, site: str, direction: str, kind: str, num_bytes: int) -> None:
        """Add bytes that the transport has sent or received."""
        self._bytes.labels(site, direction, kind).inc(num_bytes)


class CoordinatorMetrics:
    """What the coordinator exports."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.catalogue = Catalogue(registry)
        self.wire = WireMetrics(self.catalogue)
        self.run = RunMetrics(self.catalogue)
        self.codec = CodecMetrics(self.catalogue)
        self.sites = SiteMetrics(self.catalogue)
        self.state = StateMetrics(self.catalogue)

    def appear(self, site: str, num_bytes: Mapping[tuple[str, str, str], int]) -> None:
        """Show the series of a site; bytes by site, direction and kind begin at these."""
        self.sites.appear(site)
        self.wire.begin(site, num_bytes)


class RunMetrics:
    """How far the run is, and how well."""

    def __init__(self, catalogue: Catalogue) -> None:
        gauge, counter, histogram = catalogue.gauge, catalogue.counter, catalogue.histogram
        self.info = gauge("loco_run_info", "1, with the id of the run.", "run_id")
        self.planned_rounds = gauge(
            "loco_planned_rounds", "Outer rounds until the run is finished."
        )
        self.min_sites = gauge(
            "loco_quorum_min_sites", "Contributions that a round needs to close."
        )
        self.deadline = gauge(
            "loco_round_deadline_seconds",
            "A round open for so long without quorum is late (quorum.deadline_seconds).",
        )
        self.round = gauge("loco_round", "Outer round that is open or being closed.")
        self.rounds = counter("loco_rounds_total", "Outer rounds committed by this process.")
        self.progress_at = gauge(
            "loco_progress_timestamp_seconds",
            "When the last round was committed or an operator let the run go on, or else this "
            "process started.",
        )
        self.finished = gauge("loco_run_finished", "1 when the run has had all its rounds, else 0.")
        self.sites = gauge(
            "loco_sites",
            "Sites registered (ever joined), alive, included in the last round, lost (silent "
            "without a goodbye), quarantined, and evicted.",
            "state",
        )
        self.round_seconds = histogram(
            "loco_round_seconds", "Duration of a round, from opened to committed."
        )
        self.reduce_seconds = histogram(
            "loco_reduce_seconds", "Duration of making an update from the contributions."
        )
        self.phase_seconds = histogram(
            "loco_phase_seconds", "Duration of one phase of a round at a site, all sites.", "phase"
        )
        self.validation_bits_per_byte = gauge(
            "loco_validation_bits_per_byte", "Loss of theta on the held-out text, last measured."
        )
        self.held = gauge("loco_run_held", "1 while an operator has paused or drained it, else 0.")
        self.inner_steps = gauge("loco_inner_steps_per_round", "H of the current round.")
        self.alpha = gauge("loco_outer_alpha", "Outer learning rate of the current round.")
        self.k = gauge(
            "loco_values_per_chunk",
            "Values that each site keeps of a chunk in the round: k, shared where sites are many.",
        )
        self.plaintext = gauge(
            "loco_plaintext",
            "1 while everyone who reaches the coordinator's address may read and command in "
            "plaintext (--insecure), else 0.",
        )
        self.certificate_expiry = gauge(
            "loco_certificate_expiry_timestamp_seconds",
            "When a certificate ends: the coordinator's own, and that of its authority.",
            "certificate",
        )
        self.orders = counter("loco_orders_total", "Orders of operators (loco control).", "order")
        self.rejections = counter("loco_rejections_total", "Requests refused.", "reason")


class CodecMetrics:
    """What compression gives and what the updates look like; of the last committed round."""

    def __init__(self, catalogue: Catalogue) -> None:
        gauge = catalogue.gauge
        self.dense_bytes = gauge(
            "loco_dense_bytes", "Bytes of all parameters as fp32: a dense contribution."
        )
        self.contribution_bytes = gauge(
            "loco_contribution_bytes", "Payload of a site's last included contribution.", "site"
        )
        self.update_bytes = gauge("loco_update_bytes", "Payload of the last update.")
        self.compression_ratio = gauge(
            "loco_compression_ratio",
            "Dense fp32 bytes over payload bytes, a contribution (up) or an update (down).",
            "direction",
        )
        self.bits_per_value = gauge(
            "loco_bits_per_value", "Payload bits a sent value, headers included.", "direction"
        )
        self.update_norm = gauge("loco_update_norm", "Euclidean norm of the last update.")
        self.union_density = gauge(
            "loco_union_density_ratio",
            "Share of the coordinates that at least one site sent (the update's support).",
        )
        self.support_overlap = gauge(
            "loco_support_overlap_ratio",
            "How much the sites chose the same coordinates: 0 none shared, 1 nested; no value "
            "while fewer than two sites contribute.",
        )
        self.decode_seconds = catalogue.histogram(
            "loco_decode_seconds", "Duration of checking and decoding one uploaded shard."
        )


class SiteMetrics:
    """What each site does; as seen by the coordinator, or as told by heartbeats."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._rounds_and_steps(catalogue)
        self._link_and_failures(catalogue)
        self._members(catalogue)

    def _rounds_and_steps(self, catalogue: Catalogue) -> None:
        gauge, counter = catalogue.gauge, catalogue.counter
        self.alive = gauge("loco_site_alive", "1 while the site is heard of, else 0.", "site")
        self.round = gauge("loco_site_round", "Round of the theta that the site holds.", "site")
        self.tokens = counter("loco_tokens_total", "Tokens in included contributions.", "site")
        self.rounds_included = counter(
            "loco_site_rounds_included_total", "Rounds that included the site.", "site"
        )
        self.rounds_missed = counter(
            "loco_site_rounds_missed_total",
            "Rounds that closed without the site, though it was expected or is lost.",
            "site",
        )
        self.phase_seconds = counter(
            "loco_site_phase_seconds_total",
            "Seconds spent in a phase, by its leader.",
            "site",
            "phase",
        )
        self.inner_steps = counter("loco_inner_steps_total", "Inner steps made.", "site")
        self.inner_step_seconds = gauge(
            "loco_inner_step_seconds", "Mean duration of an inner step, last round.", "site"
        )
        self.train_bits_per_byte = gauge(
            "loco_train_bits_per_byte", "Mean training loss of the last round.", "site"
        )
        self.ef_norm = gauge(
            "loco_ef_norm", "Euclidean norm of the site's error feedback, last round.", "site"
        )
        self.grad_norm = gauge(
            "loco_grad_norm", "Norm of the last gradient of a round, before clipping.", "site"
        )
        self.mask_density = gauge(
            "loco_mask_density_ratio",
            "Share of the gradient's positions that the ranks exchange: below 1 with SCAPE.",
            "site",
        )
        self.skipped_steps = counter(
            "loco_skipped_steps_total",
            "Inner steps that the site skipped because a gradient was not finite.",
            "site",
        )
        self.failed_checkpoints = counter(
            "loco_failed_checkpoints_total",
            "Checkpoints that the site could not write: it goes on, and would come back from an "
            "older one.",
            "site",
        )

    def _link_and_failures(self, catalogue: Catalogue) -> None:
        gauge, counter = catalogue.gauge, catalogue.counter
        self.goodput = gauge(
            "loco_link_goodput_bytes_per_second",
            "Payload bytes a second while contributions go up or updates come down, last round.",
            "site",
            "direction",
        )
        self.link_rate = gauge(
            "loco_link_rate_bytes_per_second",
            "Rate of the site's link: as its operator stated it (--link-mbit), else the highest "
            "goodput so far.",
            "site",
            "direction",
        )
        self.digest_mismatches = counter(
            "loco_digest_mismatches_total",
            "Times that the site reported another theta than the coordinator's.",
            "site",
        )
        self.non_finite = counter(
            "loco_non_finite_total",
            "Times that the site stopped because of NaN or infinity.",
            "site",
        )
        self.retries = counter(
            "loco_retries_total", "Calls tried again, the coordinator not answering.", "site"
        )
        self.resumed_bytes = counter(
            "loco_resumed_bytes_total",
            "Bytes of downloads not fetched again after a broken connection.",
            "site",
        )
        self.certificate_expiry = gauge(
            "loco_site_certificate_expiry_timestamp_seconds",
            "When the certificate ends with which the site last sent a heartbeat.",
            "site",
        )

    def _members(self, catalogue: Catalogue) -> None:
        gauge, counter = catalogue.gauge, catalogue.counter
        self.members = gauge(
            "loco_site_members",
            "Ranks that make the site's inner steps now; 0 where they cannot come and go.",
            "site",
        )
        self.member_changes = counter(
            "loco_member_changes_total", "Times that the site's members were others.", "site"
        )
        self.quorums = counter(
            "loco_quorums_total", "Times that the site asked who its members are.", "site"
        )
        self.quorum_seconds = counter(
            "loco_quorum_seconds_total", "Seconds that it waited for the answers.", "site"
        )
        self.failed_commits = counter(
            "loco_failed_commits_total",
            "Steps and other changes of state given up because a rank was lost; they are redone.",
            "site",
        )
        self.healed_bytes = counter(
            "loco_healed_bytes_total", "Bytes of state that new ranks took from others.", "site"
        )
        self.shard_lost_fraction = gauge(
            "loco_shard_lost_fraction",
            "Share of what one rank alone held that was lost when members last changed.",
            "site",
        )
        self.in_site_bytes = counter(
            "loco_in_site_bytes_total",
            "Bytes that ranks handed to collectives in the site.",
            "site",
        )

    def appear(self, site: str) -> None:
        """Start the site's counters at 0, so that the first increase is seen as one."""
        for metric in vars(self).values():
            if isinstance(metric, Counter) and metric is not self.phase_seconds:
                metric.labels(site)


class StateMetrics:
    """The coordinator's disk; its memory and CPU are the process_* metrics of prometheus_client."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.bytes = catalogue.gauge(
            "loco_state_bytes", "Bytes of the files in the state directory."
        )
        self.disk_free = catalogue.gauge(
            "loco_state_disk_free_bytes", "Free bytes of the file system of the state directory."
        )
        self.disk_size = catalogue.gauge(
            "loco_state_disk_size_bytes", "Size of the file system of the state directory."
        )


def markdown() -> str:
    """docs/metrics.md, from the metrics themselves."""
    rows = [
        f"| `{d.name}` | {d.kind} | {', '.join(d.labels)} | {d.help} |"
        for d in CoordinatorMetrics(CollectorRegistry()).catalogue.described
    ]
    return "\n".join(
        (
            "# Metrics",
            "",
            "Written by `make dashboards` from `loco/metrics.py`; do not edit. The coordinator",
            "exports all of them, and the usual `process_*` metrics, at its `--metrics` address;",
            "a rank with `--metrics` exports `loco_build_info` and `loco_wire_bytes_total` of its",
            "own end. Site series disappear two minutes after the site left or was lost.",
            "",
            "| metric | type | labels | meaning |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
        )
    )
