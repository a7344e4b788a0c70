"""The tables of docs/scaling.md: what a round costs from 1 to 400 billion parameters.

Bytes and seconds are those of `loco.plan.predict`; what the coordinator holds follows from its
design (docs/architecture.md): theta and the residual in memory-mapped files, two snapshots of both,
`state.keep_updates` updates, and the contributions since the older snapshot. What a coordinator's
process spends is measured by benchmarks.scaling_run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean
from typing import Any

from benchmarks.recorded import SCALING, WAN_RUNS, congestion, lines_of, read, wan_setting
from coordinator.snapshots import KEEP as SNAPSHOTS_KEPT
from loco.config import CodecConfig, StateConfig
from loco.layout import Layout
from loco.plan import Prediction, Setting, predict
from loco.status import human_bytes, human_seconds

RANKS = {1e9: 8, 8e9: 64, 70e9: 512, 400e9: 2048}
"""Of a site, by parameters: they share the coding."""
SITES = (2, 8, 32, 128)
STEP_SECONDS = {1e9: 1.0, 8e9: 3.0, 70e9: 20.0, 400e9: 40.0}
"""Of an inner step, assumed: Covenant-72B (arXiv 2603.08163) computes 20 minutes for 30 steps."""
INNER_STEPS, K = 30, 64
K_SITES = int(CodecConfig().k_sites)
SITE_MBIT, COORDINATOR_MBIT, RTT_MS = 1e3, 10e3, 80
UPDATES_KEPT = int(StateConfig().keep_updates)
CONTRIBUTIONS_KEPT = SNAPSHOTS_KEPT * int(StateConfig().snapshot_every_rounds)  # rounds, at most


@dataclass(frozen=True)
class Load:
    """A round as the coordinator sees it; bytes are those of all sites together."""

    setting: Setting
    round: Prediction

    @property
    def bytes_in(self) -> int:
        return self.setting.sites * self.round.bytes_up

    @property
    def bytes_out(self) -> int:
        return self.setting.sites * self.round.bytes_down

    @property
    def memory_bytes(self) -> int:
        """Pages that a round touches: theta and the residual, all of them."""
        return 2 * self.round.snapshot_bytes

    @property
    def disk_bytes(self) -> int:
        """What it may come to, with the default rounds between snapshots."""
        return self.disk_bytes_with(updates=UPDATES_KEPT, contributions=CONTRIBUTIONS_KEPT)

    def disk_bytes_with(self, *, updates: int, contributions: int) -> int:
        """Working buffers, the snapshots of both, and what was kept of so many rounds."""
        buffers = (1 + SNAPSHOTS_KEPT) * self.memory_bytes
        return buffers + updates * self.round.bytes_down + contributions * self.bytes_in

    @property
    def blocking_parts(self) -> dict[str, float]:
        """Seconds of the exchange by who spends them."""
        p = self.round
        return {
            "sites' coding": p.encode_seconds + p.apply_seconds,
            "uplink": p.up_seconds,
            "coordinator's core": p.coordinator_seconds,
            "downlink": p.down_seconds,
            "round trips": p.latency_seconds,
        }

    @property
    def longest(self) -> str:
        parts = self.blocking_parts
        return max(parts, key=parts.__getitem__)


@cache
def load(params: float, sites: int, coordinator_mbit: float | None = COORDINATOR_MBIT) -> Load:
    """The round of `params` parameters on `sites` sites."""
    setting = Setting(
        layout=Layout.of([("parameters", (int(params),))]), sites=sites, ranks=RANKS[params], k=K,
        bits=2, k_sites=K_SITES, inner_steps=INNER_STEPS, fragments=1, delay_steps=0,
        step_seconds=STEP_SECONDS[params],
        up_mbit=SITE_MBIT, down_mbit=SITE_MBIT, coordinator_mbit=coordinator_mbit, rtt_ms=RTT_MS,
    )  # fmt: skip
    return Load(setting, predict(setting))


def table() -> list[str]:
    """One row for each size and number of sites."""
    lines = [
        "| parameters | sites | up, a site | down, a site | out of the coordinator "
        "| coordinator's core | memory | disk | exchange | computing, waiting | computing, hidden "
        "| longest |",
        "| --- |" + " --- |" * 11,
    ]
    for params in RANKS:
        for sites in SITES:
            one = load(params, sites)
            p = one.round
            lines.append(
                f"| {params / 1e9:g}B | {sites} | {human_bytes(p.bytes_up)} "
                f"| {human_bytes(p.bytes_down)} | {human_bytes(one.bytes_out)} "
                f"| {seconds(p.coordinator_seconds)} | {human_bytes(one.memory_bytes)} "
                f"| {human_bytes(one.disk_bytes)} | {seconds(p.exchange_seconds)} "
                f"| {p.utilisation_blocking:.0%} | {p.utilisation_overlapped:.0%} "
                f"| {one.longest} |"
            )
    return lines


def limits() -> list[str]:
    """By size: the most sites whose exchange still hides behind the inner steps."""
    dearer = core_factor()
    lines = [
        "| parameters | sites that still compute 95 % with overlap | a core's work as measured, "
        f"{dearer:.1f} times the formula's | that on eight cores | with the downlink relayed "
        "besides | dense DiLoCo, seconds a site |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    ways = ((1.0, False), (dearer, False), (dearer / 8, False), (dearer / 8, True))
    for params in RANKS:
        dense = predict(replace(load(params, 2).setting, bits=32))
        counts = [most_sites(params, core, relayed) for core, relayed in ways]
        told = " | ".join("none" if count == 0 else str(count) for count in counts)
        lines.append(
            f"| {params / 1e9:g}B | {told} | {seconds(dense.up_seconds + dense.down_seconds)} |"
        )
    return lines


def core_factor() -> float:
    """CPU of a measured round over the formula's seconds of the coordinator's core."""
    return fmean(
        row["cpu_seconds_a_round"] / load_of(row).round.coordinator_seconds
        for row in lines_of(SCALING)
        if "sites" in row
    )


def measured() -> list[str]:
    """The formulas against the exchange over an emulated line (benchmarks.wan)."""
    lines = [
        "| parameters | Mbit/s | round trip | congestion control | exchange: formula | measured "
        "| up: formula | measured, at the card | down: formula | measured |",
        "| --- |" + " --- |" * 9,
    ]
    for report in map(read, WAN_RUNS):
        row = report["methods"]["blocking"]
        p = predict(wan_setting(report))
        lines.append(
            f"| {report['params'] / 1e6:.3g} M | {report['mbit']:g} | {report['rtt_ms']:g} ms "
            f"| {congestion(report)} | {p.exchange_seconds:.2f} s | {row['sync_seconds']:.2f} s "
            f"| {human_bytes(p.bytes_up)} | {human_bytes(row['wire_bytes_up'])} "
            f"| {human_bytes(p.bytes_down)} | {human_bytes(row['wire_bytes_down'])} |"
        )
    return lines


def coordinator() -> list[str]:
    """The formulas against the process of a real coordinator, with light sites on loopback."""
    lines = [
        "| parameters | sites | CPU of a round: formula | measured | of a snapshot, measured "
        "| memory: formula | peak | of it not mapped files | disk: formula | measured "
        "| update: formula | measured |",
        "| --- |" + " --- |" * 11,
    ]
    for row in (row for row in lines_of(SCALING) if "sites" in row):
        one = load_of(row)
        rounds = row["rounds"]
        disk = one.disk_bytes_with(updates=rounds, contributions=rounds)
        lines.append(
            f"| {row['params'] / 1e6:.0f} M | {row['sites']} "
            f"| {one.round.coordinator_seconds:.2f} s | {row['cpu_seconds_a_round']:.2f} s "
            f"| {row['cpu_seconds_a_snapshot']:.2f} s "
            f"| {human_bytes(one.memory_bytes)} | {human_bytes(row['peak_memory_bytes'])} "
            f"| {human_bytes(row['own_memory_bytes'])} "
            f"| {human_bytes(disk)} | {human_bytes(row['disk_bytes'])} "
            f"| {human_bytes(one.round.bytes_down)} | {human_bytes(row['bytes_down'])} |"
        )
    return lines


def load_of(row: dict[str, Any]) -> Load:
    """What the formulas say of a measured round; one rank a site, links without a limit."""
    setting = replace(
        load(1e9, 2).setting,
        layout=Layout.of([("parameters", (int(row["params"]),))]), sites=row["sites"], ranks=1,
        k=row["k"], k_sites=row["k_sites"],
    )  # fmt: skip
    return Load(setting, predict(setting))


def transport() -> list[str]:
    """CPU of the coordinator's process a megabyte, and what that makes of the largest rounds."""
    rows = [row for row in lines_of(SCALING) if "tls" in row]
    lines = [
        "| over | moved | CPU a MB sent | CPU a MB received, synced and checked |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {'mutual TLS' if row['tls'] else 'plaintext'} | {row['megabytes']:.0f} MB each way "
        f"| {row['cpu_ms_a_megabyte_sent']:.1f} ms | {row['cpu_ms_a_megabyte_received']:.1f} ms |"
        for row in rows
    ]
    sent = fmean(row["cpu_ms_a_megabyte_sent"] for row in rows if row["tls"])
    told = ", ".join(
        f"{params / 1e9:g}B {seconds(load(params, SITES[-1]).bytes_out / 1e6 * sent / 1e3)}"
        for params in RANKS
    )
    lines += ["", f"With {SITES[-1]} sites, a round's updates then cost a core: {told}."]
    return lines


def most_sites(params: float, core: float, relayed: bool) -> int:
    """Of SITES, the most whose exchange takes no longer than the inner steps over 0.95.

    `core`: what the coordinator's part takes, times the formula's seconds. `relayed`: caches beside
    the sites pass updates on; the coordinator's link is then not shared.
    """
    fitting = [0]
    for sites in SITES:
        one = load(params, sites, None if relayed else COORDINATOR_MBIT)
        parts = one.blocking_parts
        parts["coordinator's core"] *= core
        if sum(parts.values()) <= INNER_STEPS * STEP_SECONDS[params] / 0.95:
            fitting.append(sites)
    return max(fitting)


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 90 else human_seconds(value)
