"""The tables of docs/scaling.md: what a round costs from 1 to 400 billion parameters.

Bytes and seconds are those of `loco.plan.predict`; what the coordinator holds follows from its
design (docs/architecture.md): theta and the residual in memory-mapped files, two snapshots of both,
`state.keep_updates` updates, and the contributions since the older snapshot. What a coordinator's
process spends is measured by benchmarks.scaling_run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from benchmarks.recorded import (
    SCALING,
    SCALING_FIT,
    WAN_RUNS,
    congestion,
    lines_of,
    read,
    wan_setting,
)
from coordinator.snapshots import KEEP as SNAPSHOTS_KEPT
from loco.config import CodecConfig, StateConfig
from loco.layout import Layout
from loco.plan import (
    HANDOVER_STEPS,
    SERVE_SECONDS_A_BYTE_SENT,
    TARGET,
    Prediction,
    Setting,
    predict,
)
from loco.status import human_bytes, human_seconds

RANKS = {1e9: 8, 8e9: 64, 70e9: 512, 400e9: 2048}
"""Of a site, by parameters: they share the coding."""
SITES = (2, 8, 32, 128)
STEP_SECONDS = {1e9: 1.0, 8e9: 3.0, 70e9: 20.0, 400e9: 40.0}
"""Of an inner step, assumed: Covenant-72B (arXiv 2603.08163) computes 20 minutes for 30 steps."""
INNER_STEPS, K = 30, 64
K_SITES = int(CodecConfig().k_sites)
SITE_MBIT, COORDINATOR_MBIT, RTT_MS = 1e3, 10e3, 80
COORDINATOR_CORES = 8
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
            "coordinator's cores": p.coordinator_seconds,
            "downlink": p.down_seconds,
            "round trips": p.latency_seconds,
        }

    @property
    def longest(self) -> str:
        parts = self.blocking_parts
        return max(parts, key=parts.__getitem__)


@cache
def load(
    params: float, sites: int, mbit: float | None = COORDINATOR_MBIT, cores: int = COORDINATOR_CORES
) -> Load:
    """The round of `params` parameters on `sites` sites; a coordinator with so many cores."""
    setting = Setting(
        layout=Layout.of([("parameters", (int(params),))]), sites=sites, ranks=RANKS[params], k=K,
        bits=2, k_sites=K_SITES, inner_steps=INNER_STEPS, fragments=1, delay_steps=0,
        step_seconds=STEP_SECONDS[params],
        up_mbit=SITE_MBIT, down_mbit=SITE_MBIT, coordinator_mbit=mbit, rtt_ms=RTT_MS,
        coordinator_cores=cores,
    )  # fmt: skip
    return Load(setting, predict(setting))


def table() -> list[str]:
    """One row for each size and number of sites."""
    lines = [
        "| parameters | sites | up, a site | down, a site | out of the coordinator "
        "| coordinator's cores | memory | disk | exchange | computing, waiting | computing, hidden "
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
    lines = [
        "| parameters | sites that still compute 95 % with overlap, coordinator of one core "
        f"| {COORDINATOR_CORES} cores | and the downlink relayed | dense DiLoCo, seconds a site |",
        "| --- |" + " --- |" * 4,
    ]
    ways = ((1, False), (COORDINATOR_CORES, False), (COORDINATOR_CORES, True))
    for params in RANKS:
        dense = predict(replace(load(params, 2).setting, bits=32))
        counts = [most_sites(params, cores, relayed) for cores, relayed in ways]
        told = " | ".join("none" if count == 0 else str(count) for count in counts)
        lines.append(
            f"| {params / 1e9:g}B | {told} | {seconds(dense.up_seconds + dense.down_seconds)} |"
        )
    return lines


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


def fit() -> list[str]:
    """The formula of the coordinator's CPU against the rounds that it was fitted to."""
    lines = [
        "| parameters | sites | CPU of a round: formula | measured |",
        "| --- |" + " --- |" * 3,
    ]
    for row in rounds_in(SCALING_FIT):
        formula = load_of(row).round.coordinator_cpu_seconds
        lines.append(
            f"| {row['params'] / 1e6:.0f} M | {row['sites']} "
            f"| {formula:.2f} s | {row['cpu_seconds_a_round']:.2f} s |"
        )
    return lines


def coordinator() -> list[str]:
    """The process of a real coordinator on the slower machine, with light sites on loopback."""
    lines = [
        "| parameters | sites | CPU of a round | over the formula's | on the clock | of a snapshot "
        "| memory: formula | peak | of it not mapped files | disk: formula | measured "
        "| update: formula | measured |",
        "| --- |" + " --- |" * 12,
    ]
    for row in rounds_in(SCALING):
        one = load_of(row)
        rounds = row["rounds"]
        disk = one.disk_bytes_with(updates=rounds, contributions=rounds)
        cpu = row["cpu_seconds_a_round"]
        lines.append(
            f"| {row['params'] / 1e6:.0f} M | {row['sites']} "
            f"| {cpu:.2f} s | {cpu / one.round.coordinator_cpu_seconds:.1f} "
            f"| {row['seconds_a_round']:.2f} s | {row['cpu_seconds_a_snapshot']:.2f} s "
            f"| {human_bytes(one.memory_bytes)} | {human_bytes(row['peak_memory_bytes'])} "
            f"| {human_bytes(row['own_memory_bytes'])} "
            f"| {human_bytes(disk)} | {human_bytes(row['disk_bytes'])} "
            f"| {human_bytes(one.round.bytes_down)} | {human_bytes(row['bytes_down'])} |"
        )
    return lines


def rounds_in(name: str) -> list[dict[str, Any]]:
    """The measured rounds of a result file, which has lines about transport, too."""
    return [row for row in lines_of(name) if "sites" in row]


def load_of(row: dict[str, Any]) -> Load:
    """What the formulas say of a measured round; one rank a site, links without a limit."""
    setting = replace(
        load(1e9, 2).setting,
        layout=Layout.of([("parameters", (int(row["params"]),))]), sites=row["sites"], ranks=1,
        k=row["k"], k_sites=row["k_sites"],
    )  # fmt: skip
    return Load(setting, predict(setting))


def transport() -> list[str]:
    """CPU of the coordinator's process a megabyte, on both machines."""
    lines = [
        "| machine | over | moved | CPU a MB sent | CPU a MB received, synced and checked |",
        "| --- | --- | --- | --- | --- |",
    ]
    for machine, name in (("of the fit", SCALING_FIT), ("the slower", SCALING)):
        lines += [
            f"| {machine} | {'mutual TLS' if row['tls'] else 'plaintext'} "
            f"| {row['megabytes']:.0f} MB each way | {row['cpu_ms_a_megabyte_sent']:.1f} ms "
            f"| {row['cpu_ms_a_megabyte_received']:.1f} ms |"
            for row in lines_of(name)
            if "tls" in row
        ]
    return lines


def most_sites(params: float, cores: int, relayed: bool) -> int:
    """Of SITES, the most that compute 95 % of the time with the longest delay.

    `cores`: of the coordinator. `relayed`: caches beside the sites pass updates on, so that the
    coordinator sends each once and no site shares its link.
    """
    fitting = [0]
    for sites in SITES:
        one = load(params, sites, None if relayed else COORDINATOR_MBIT, cores)
        exchange = sum(one.blocking_parts.values())
        if relayed:
            exchange -= (sites - 1) * one.round.bytes_down * SERVE_SECONDS_A_BYTE_SENT
        hidden = (INNER_STEPS - HANDOVER_STEPS) * STEP_SECONDS[params]
        if exchange - hidden <= one.round.compute_seconds * (1 / TARGET - 1):
            fitting.append(sites)
    return max(fitting)


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 90 else human_seconds(value)
