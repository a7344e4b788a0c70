"""Listens to the run: metrics, log lines, and what the page and `loco status` show.

It never influences the run: no decision of the machine depends on it, and what it keeps on disk
(history.sqlite) may be lost.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import sqlite3
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector

from coordinator.beats import plain
from coordinator.events import (
    Event,
    Heard,
    HoldChanged,
    Recovered,
    RoundClosed,
    RoundCommitted,
    RoundOpened,
    Say,
    ShardStored,
    SiteEvicted,
    SiteJoined,
    SiteLeft,
    SiteLost,
    SiteQuarantined,
    SiteReturned,
)
from coordinator.history import HISTORY_FILE, RUN, History, HistoryFile
from coordinator.keys import Keys
from coordinator.measure import directory_bytes, measure_update, support_overlap
from coordinator.notes import Note, order_words
from coordinator.settings import in_force, k_of_round
from coordinator.state import State, Update
from coordinator.status import status_document
from coordinator.store import Store
from coordinator.told import Told
from coordinator.tracing import traces_if_wanted
from loco.certs.identity import Identity
from loco.log import log_fields
from loco.metrics import ORDERS, PHASES, STATES, CoordinatorMetrics
from loco.wire.v1 import coordinator_pb2 as pb

log = logging.getLogger("loco.coordinator")

# Longer than the usual scrape interval, so that Prometheus gets the last bytes of a site that left.
LINGER_SECONDS = 120.0
HOUSEKEEPING_SECONDS = 1.0
PLAINTEXT_SAID_SECONDS = 600.0
_DISK_SECONDS = 30.0
_KEPT_NOTES = 50


class Monitor:
    """`observe` is called by the engine, `heartbeat` and others by the service."""

    def __init__(
        self,
        store: Store,
        clock: Callable[[], float] = time.time,
        *,
        keys: Keys | None = None,
        plaintext: bool = False,
    ) -> None:
        """`plaintext`: others than this machine reach the coordinator without a certificate."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.metrics = CoordinatorMetrics(self.registry)
        self.store = store
        self.started_at = clock()
        self.bytes: Counter[tuple[str, str, str]]  # site, direction, kind
        self.told: dict[str, Told] = {}
        self.refusals: deque[Note] = deque(maxlen=_KEPT_NOTES)
        self.notes: deque[Note] = deque(maxlen=_KEPT_NOTES)
        self.bits_per_value_up: float | None = None  # of the last committed round
        self.plaintext = plaintext
        self._keys = keys
        self._plaintext_said_at = -math.inf
        self._clock = clock
        self._decoded: dict[tuple[str, int], int] = {}  # site, shard -> values; of the open round
        self._unmeasured: dict[int, dict[str, int]] = {}  # round -> values by included site
        self._disk_at = -math.inf
        self._visible: dict[str, float | None] = {}  # sites with series -> when they departed
        self._file = HistoryFile.open_or_begin_anew(store.directory / HISTORY_FILE)
        self.history = History()
        self.history.restore(self._file.read())
        self.bytes = Counter(self._file.take_bytes())
        self._traces = traces_if_wanted(store.run_id)
        self._describe_run()

    def _describe_run(self) -> None:
        log_fields(run=self.store.run_id)
        config, run = self.store.config, self.metrics.run
        run.info.labels(self.store.run_id).set(1)
        run.planned_rounds.set(config.run.rounds)
        run.min_sites.set(config.quorum.min_sites)
        run.deadline.set(config.quorum.deadline_seconds)
        run.progress_at.set(self.started_at)
        run.plaintext.set(self.plaintext)
        self.metrics.codec.dense_bytes.set(self.store.layout.dense_bytes)
        codec = self.metrics.codec
        for unknown in (
            run.validation_bits_per_byte,
            codec.update_norm,
            codec.union_density,
            codec.support_overlap,
        ):
            unknown.set(math.nan)  # until there is a round, or a second site
        for reason in pb.RefusalReason.keys()[1:]:
            run.rejections.labels(reason.removeprefix("REFUSAL_REASON_").lower())
        for phase in PHASES:
            run.phase_seconds.labels(phase)
        for order in ORDERS:
            run.orders.labels(order)

    # --- what happens to the run ----------------------------------------------------------------

    def observe(self, event: Event | Say, state: State) -> None:
        """Called by the engine after every change of the state."""
        now = self._clock()
        log_fields(round=state.round, phase=state.phase)
        match event:
            case Say(message=message):
                self._note("late", message, level=logging.WARNING)
            case Recovered():
                self._recovered(state)
            case RoundOpened():
                if math.isnan(self.history.run.get("opened_at", event.round)):  # else opened wider
                    self.history.tell(RUN, event.round, opened_at=now)
                    if self._traces:
                        self._traces.opened(event.round, now)
            case RoundClosed():
                self._closed(event, state)
            case RoundCommitted():
                self._committed(event, state)
            case SiteJoined():
                self._joined(event, state)
            case SiteLeft():
                self._departed(event.site, "left", event.reason)
            case SiteLost():
                self._departed(event.site, "lost", "nothing heard of it")
            case SiteReturned():
                self._appear(event.site)
                self._note("returned", f"site {event.site} is heard of again", site=event.site)
            case HoldChanged(hold="none"):
                self.metrics.run.progress_at.set(now)  # else the pause would be in it
            case SiteQuarantined():
                self._departed(event.site, "quarantined", "too many refused contributions in a row")
        if (order := order_words(event)) is not None:
            self._ordered(event, *order)
        if not isinstance(event, Heard | ShardStored):  # they come often and change none of this
            self._forget_departed(now)
            self._describe(state)

    def _recovered(self, state: State) -> None:
        self.history.reach(state.round)
        for name, site in state.sites.items():
            if site.alive:
                self._appear(name)

    def _ordered(self, event: Event | Say, order: str, message: str) -> None:
        self.metrics.run.orders.labels(order).inc()
        self._note(order, f"an operator has {message}")
        if isinstance(event, SiteEvicted):
            self._departed(event.site, "evicted", "by an operator")

    def _joined(self, event: SiteJoined, state: State) -> None:
        incarnation = state.sites[event.site].incarnation
        self.told[event.site] = Told(incarnation=incarnation, baseline_known=True)
        self._appear(event.site)
        message = f"site {event.site} joined with {event.num_shards} shards (incarnation"
        self._note("joined", f"{message} {incarnation})", site=event.site)

    def _departed(self, site: str, how: str, why: str) -> None:
        if site in self._visible:
            self._visible[site] = self._clock()
        level = logging.WARNING if how == "lost" else logging.INFO
        self._note(how, f"site {site} {how}: {why}", site=site, level=level)

    def _note(self, what: str, message: str, *, site: str = "", level: int = logging.INFO) -> None:
        self.notes.append(Note(at=self._clock(), what=what, message=message))
        log.log(level, message, extra={"site": site} if site else None)

    def _closed(self, event: RoundClosed, state: State) -> None:
        self.history.tell(
            RUN, event.round, closed_at=self._clock(), num_included=len(event.included)
        )
        lost = {name for name, site in state.sites.items() if site.status == "lost"}
        for name in {*event.missing, *lost} & self._visible.keys():
            self.metrics.sites.rounds_missed.labels(name).inc()

    def _committed(self, event: RoundCommitted, state: State) -> None:
        run, sites, now = self.metrics.run, self.metrics.sites, self._clock()
        update = state.updates[event.round]
        self.history.tell(RUN, event.round, committed_at=now, update_bytes=event.update_bytes)
        for name, have in update.included.items():
            self.history.tell(name, event.round, contribution_bytes=have.size_bytes)
        run.rounds.inc()
        run.progress_at.set(now)
        for column, histogram in (
            ("opened_at", run.round_seconds),
            ("closed_at", run.reduce_seconds),
        ):
            began = self.history.run.get(column, event.round)
            if not math.isnan(began):  # a crash may have lost it
                histogram.observe(now - began)
        log.info(
            "round %d committed: %s; update %d bytes, theta %s",
            event.round,
            ", ".join(update.included),
            event.update_bytes,
            event.theta_digest[:16],
        )
        for name in update.included.keys() & self._visible.keys():
            sites.tokens.labels(name).inc(update.included[name].tokens)
            sites.rounds_included.labels(name).inc()
        values = self._decoded_values(update)
        self._measure_payloads(update, sum(values.values()))
        self._unmeasured[event.round] = values
        if self._traces:
            closed_at = self.history.run.get("closed_at", event.round)
            self._traces.committed(event.round, closed_at, now)
        self.history.reach(event.round + 1)

    def _decoded_values(self, update: Update) -> dict[str, int]:
        """Values by included site; empty where a shard was decoded by an earlier process."""
        decoded, self._decoded = self._decoded, {}
        shards = {name: range(have.num_shards) for name, have in update.included.items()}
        if any((name, shard) not in decoded for name in shards for shard in shards[name]):
            return {}
        return {name: sum(decoded[name, shard] for shard in shards[name]) for name in shards}

    def _measure_payloads(self, update: Update, num_values: int) -> None:
        codec, dense = self.metrics.codec, self.store.layout.dense_bytes
        sizes = {name: have.size_bytes for name, have in update.included.items()}
        for name in sizes.keys() & self._visible.keys():
            codec.contribution_bytes.labels(name).set(sizes[name])
        codec.update_bytes.set(update.size_bytes)
        codec.compression_ratio.labels("down").set(dense / max(1, update.size_bytes))
        codec.compression_ratio.labels("up").set(dense * len(sizes) / max(1, sum(sizes.values())))
        if num_values:
            self.bits_per_value_up = 8 * sum(sizes.values()) / num_values
            codec.bits_per_value.labels("up").set(self.bits_per_value_up)

    def _describe(self, state: State) -> None:
        run, config = self.metrics.run, self.store.config
        run.round.set(state.round)
        run.finished.set(state.phase == "finished")
        run.held.set(state.hold != "none")
        run.inner_steps.set(state.inner_steps)
        run.alpha.set(in_force("outer.alpha", config, state.settings, state.round))
        run.k.set(k_of_round(config, state, state.round))
        last = state.updates.get(state.round - 1)
        statuses = Counter(site.status for site in state.sites.values())
        counts = {
            "registered": len(state.sites),
            "alive": statuses["syncing"] + statuses["ready"],
            "included": len(last.included) if last else 0,
            **{name: statuses[name] for name in ("lost", "quarantined", "evicted")},
        }
        for name in STATES:
            run.sites.labels(name).set(counts[name])
        for name in self._visible:
            self.metrics.sites.alive.labels(name).set(state.sites[name].alive)

    # --- series of sites ------------------------------------------------------------------------

    def _appear(self, site: str) -> None:
        if site not in self._visible:
            self.metrics.appear(site, self.bytes)
        self._visible[site] = None

    def _forget_departed(self, now: float) -> None:
        for site, since in list(self._visible.items()):
            if since is not None and now - since > LINGER_SECONDS:
                del self._visible[site]
                self.metrics.catalogue.forget_site(site)
                if site in self.told:
                    self.told[site].spans.clear()  # the rest is small, and the status shows it

    def count(self, site: str, direction: str, kind: str, num_bytes: int) -> None:
        """Bytes of one message; those of strangers are counted together as site `none`."""
        label = site if site in self._visible else "none"
        self.metrics.wire.count(label, direction, kind, num_bytes)
        self.bytes[label, direction, kind] += num_bytes

    # --- what the service tells -----------------------------------------------------------------

    def contribution(self, event: ShardStored, num_values: int) -> None:
        """A shard was checked and decoded: so many values."""
        self._decoded[event.site, event.shard] = num_values

    def refused(self, reason: str, message: str) -> None:
        self.metrics.run.rejections.labels(reason).inc()
        self.refusals.append(Note(at=self._clock(), what=reason, message=message))

    def certificate(self, identity: Identity) -> None:
        """A site has shown this certificate."""
        if identity.name in self._visible:
            gauge = self.metrics.sites.certificate_expiry
            gauge.labels(identity.name).set(identity.not_after)

    def digest_mismatch(self, site: str) -> None:
        self.metrics.sites.digest_mismatches.labels(site).inc()

    def heartbeat(self, beat: pb.HeartbeatRequest) -> None:
        """Keep what a site says of itself; it is a member, which the caller has checked."""
        beat = plain(beat)
        site, incarnation = beat.caller.site, beat.caller.incarnation
        told = self.told.get(site)
        if told is None or told.incarnation != incarnation:
            told = self.told[site] = Told(incarnation=incarnation, baseline_known=False)
        if self._visible.get(site, 0.0) is not None:  # heard again after it was lost
            self._appear(site)
        told.take(beat)
        self._take_spans(site, told, beat)
        self._take_reports(site, beat)
        self._measure_link(site, told, beat)
        if beat.step_seconds:
            self.metrics.sites.inner_step_seconds.labels(site).set(beat.step_seconds)
        self._export(site, told, beat)

    def _take_spans(self, site: str, told: Told, beat: pb.HeartbeatRequest) -> None:
        for span in told.new_spans(beat, self._clock()):
            self.history.tell_phase(site, span.round, span.phase, span.seconds)
            self.metrics.run.phase_seconds.labels(span.phase).observe(span.seconds)
            if self._traces:
                self._traces.phase(site, span)

    def _take_reports(self, site: str, beat: pb.HeartbeatRequest) -> None:
        for report in beat.reports:
            self.history.tell(site, report.round, ef_norm=report.ef_norm)
            if report.HasField("train_bits_per_byte"):
                loss = report.train_bits_per_byte
                self.history.tell(site, report.round, train_bits_per_byte=loss)
            sites = self.metrics.sites
            sites.ef_norm.labels(site).set(report.ef_norm)
            if report.HasField("grad_norm"):
                sites.grad_norm.labels(site).set(report.grad_norm)
            sites.mask_density.labels(site).set(report.mask_density)
        for measured in beat.evaluations:
            self.history.tell(RUN, measured.round, validation_bits_per_byte=measured.bits_per_byte)
            self.metrics.run.validation_bits_per_byte.set(measured.bits_per_byte)

    def _measure_link(self, site: str, told: Told, beat: pb.HeartbeatRequest) -> None:
        """By what the leader says of its own transfers: the other ranks' parts go beside them."""
        moved = {
            "up": (beat.totals.up_seconds, beat.totals.up_bytes),
            "down": (beat.totals.down_seconds, beat.totals.down_bytes),
        }
        for direction, (seconds, num_bytes) in moved.items():
            told.measure_link(direction, seconds, max(1, beat.ranks) * num_bytes)
            if beat.link_bytes_per_second:
                told.link_rate[direction] = beat.link_bytes_per_second
            for rates, gauge in (
                (told.goodput, self.metrics.sites.goodput),
                (told.link_rate, self.metrics.sites.link_rate),
            ):
                if direction in rates:
                    gauge.labels(site, direction).set(rates[direction])

    def _export(self, site: str, told: Told, beat: pb.HeartbeatRequest) -> None:
        sites = self.metrics.sites
        sites.round.labels(site).set(told.round)
        sites.members.labels(site).set(beat.membership.members)
        sites.shard_lost_fraction.labels(site).set(beat.membership.lost_fraction)
        if told.train_bits_per_byte is not None:
            sites.train_bits_per_byte.labels(site).set(told.train_bits_per_byte)
        for phase, seconds in told.phase_seconds.items():
            told.grow(sites.phase_seconds.labels(site, phase), phase, seconds)
        for counter, name, value in (
            (sites.retries, "retries", beat.totals.retries),
            (sites.resumed_bytes, "resumed_bytes", beat.totals.resumed_bytes),
            (sites.in_site_bytes, "in_site_bytes", beat.totals.in_site_bytes),
            (sites.member_changes, "member_changes", beat.membership.changes),
            (sites.quorums, "quorums", beat.membership.quorums),
            (sites.quorum_seconds, "quorum_seconds", beat.membership.quorum_seconds),
            (sites.failed_commits, "failed_commits", beat.membership.failed_commits),
            (sites.healed_bytes, "healed_bytes", beat.membership.healed_bytes),
            (sites.skipped_steps, "skipped_steps", beat.totals.skipped_steps),
            (sites.failed_checkpoints, "failed_checkpoints", beat.totals.failed_checkpoints),
            (sites.inner_steps, "inner_steps", told.inner_steps),
            (sites.non_finite, "non_finite", beat.non_finite),
        ):
            told.grow(counter.labels(site), name, value)

    # --- what takes time: off the event loop ----------------------------------------------------

    async def keep_house(self) -> None:
        """Until cancelled: measure updates, watch the disk, write down what sites told."""
        while True:
            await asyncio.sleep(HOUSEKEEPING_SECONDS)
            try:
                await self.housekeeping()
            except (OSError, sqlite3.Error) as error:  # a full disk must not end the run here
                log.warning("could not write down what sites told: %s", error)
            except Exception:  # a bug: to stop here would be to watch nothing from now on
                log.exception("a turn of housekeeping failed")

    async def housekeeping(self) -> None:
        """One turn of `keep_house`."""
        self._watch_credentials()
        for round_ in list(self._unmeasured):
            await self._measure_update(round_, self._unmeasured.pop(round_))
        rows = self.history.take_unwritten()
        if rows:
            await self._write_history(rows)
        if time.monotonic() - self._disk_at > _DISK_SECONDS:
            self._disk_at = time.monotonic()
            used = await asyncio.to_thread(directory_bytes, self.store.directory)
            disk = shutil.disk_usage(self.store.directory)
            self.metrics.state.bytes.set(used)
            self.metrics.state.disk_free.set(disk.free)
            self.metrics.state.disk_size.set(disk.total)

    def _watch_credentials(self) -> None:
        if self._keys is not None:
            self._keys.look()
            bundle, gauge = self._keys.bundle, self.metrics.run.certificate_expiry
            gauge.labels("coordinator").set(bundle.identity.not_after)
            gauge.labels("authority").set(bundle.authority.not_valid_after_utc.timestamp())
        if self.plaintext and time.monotonic() - self._plaintext_said_at > PLAINTEXT_SAID_SECONDS:
            self._plaintext_said_at = time.monotonic()
            log.warning(
                "PLAINTEXT (--insecure): everyone who reaches this address may read and command; "
                "loco certs init makes certificates"
            )

    async def _write_history(self, rows: list[tuple[int, str, str]]) -> None:
        try:
            await asyncio.to_thread(self._file.write, rows, self.history.rounds.start)
        except sqlite3.OperationalError:  # a full disk: with the next turn that has room
            self.history.give_back(rows)
            raise

    async def _measure_update(self, round_: int, values_by_site: dict[str, int]) -> None:
        path = self.store.update(round_)
        measured = await asyncio.to_thread(measure_update, path, self.store.layout)
        if measured is None:  # whoever serves a damaged one says so
            return
        overlap = support_overlap(list(values_by_site.values()), measured.num_values)
        codec = self.metrics.codec
        codec.update_norm.set(measured.norm)
        codec.union_density.set(measured.density)
        codec.support_overlap.set(math.nan if overlap is None else overlap)
        codec.bits_per_value.labels("down").set(measured.bits_per_value)
        self.history.tell(
            RUN,
            round_,
            update_norm=measured.norm,
            update_density=measured.density,
            **({} if overlap is None else {"support_overlap": overlap}),
        )

    async def close(self) -> None:
        """A last turn, then close the file."""
        await self.housekeeping()
        self._file.leave_bytes(self.bytes)
        self._file.close()
        if self._traces:
            await asyncio.to_thread(self._traces.close)

    # --- what people see ------------------------------------------------------------------------

    def status(self, state: State) -> dict[str, Any]:
        """/status.json, `loco status`, and the numbers on the page."""
        return status_document(self, state, self._clock())

    def timeline(self, since: float) -> dict[str, Any]:
        """The spans that ended after `since` (Unix seconds), by site."""
        return {
            "now": round(self._clock(), 3),
            "sites": {
                site: [
                    [span.phase, span.round, round(span.started_at, 3), round(span.seconds, 3)]
                    for span in told.spans
                    if span.started_at + span.seconds > since
                ]
                for site, told in sorted(self.told.items())
                if site in self._visible
            },
        }
