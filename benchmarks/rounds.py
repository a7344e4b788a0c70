"""What a round costs beside training: coming back, memory, and coordination of an empty round.

    python -m benchmarks.rounds            # a table (about ten minutes on two cores)
    python -m benchmarks.rounds --json     # one object

A real coordinator process on loopback; sites that speak the wire through the worker's own session
and hold no theta, all in this process. Goals: in service within 2 s of its start at 1 M parameters,
and replay linear in the log; peak memory below 2 theta + 256 MB with 2 and with 16 sites, flat over
100 rounds of which half fail for a site; below 20 ms a round with 8 sites that send nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rounds_run import (
    CoordinatorProcess,
    LightSite,
    random_body,
    read_run,
    together,
    zero_body,
)
from coordinator.recovery import recover
from coordinator.store import Store

Raw = dict[str, dict[str, Any]]

MODELS = {  # about so many million parameters
    0.02: {"dim": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 64},
    1.0: {"dim": 128, "num_layers": 5, "num_heads": 2, "num_kv_heads": 2, "ffn_dim": 344},
    4.0: {"dim": 256, "num_layers": 5, "num_heads": 4, "num_kv_heads": 4, "ffn_dim": 688},
}
LOG_ROUNDS = (0, 10, 20, 40, 80)  # since the last snapshot; 10 is the most by default
STARTS = 3
MEMORY_ROUNDS, MEMORY_SITES = 100, (2, 16)
EMPTY_ROUNDS, EMPTY_SITES = 200, 8
STAGGER_SECONDS = 0.01


def run_of(millions: float, *, rounds: int, sites: int, snapshot_every: int) -> Raw:
    """A run whose rounds close when all sites are in, or half a second after all but one are."""
    return {
        "run": {"name": "rounds", "rounds": rounds, "seed": 1},
        "model": {**MODELS[millions], "seq_len": 32},
        "quorum": {
            "min_sites": max(1, sites - 1),
            "grace_seconds": 0.5,
            "heartbeat_seconds": 1000.0,
            "dead_after_seconds": 3600.0,
        },
        "state": {
            "snapshot_every_rounds": snapshot_every,
            "keep_updates": max(100, snapshot_every),
        },
        "limits": {"requests_per_second": 1e6},  # all sites share one address here
        "eval": {"every_rounds": 0},
    }


def members(coordinator: CoordinatorProcess, count: int, bodies: str) -> list[LightSite]:
    """Sites that have joined; `bodies` is "random" or "zero"."""
    config, layout = read_run(coordinator)
    sites = []
    for i in range(count):
        body = (
            zero_body(layout, config)
            if bodies == "zero"
            else random_body(layout, config.codec.k, config.codec.bits, i)
        )
        sites.append(LightSite(coordinator.address, f"site-{i:02}", body))
        sites[-1].join(layout)
    return sites


# --- coming back --------------------------------------------------------------------------------


def measure_restart(directory: Path) -> dict[str, Any]:
    """Seconds to the first answer, and of replay alone, against the rounds since a snapshot."""
    raw = run_of(1.0, rounds=10_000, sites=2, snapshot_every=1_000)
    coordinator = CoordinatorProcess(directory, raw)
    coordinator.start()
    sites = members(coordinator, 2, "random")
    rows = []
    for rounds in LOG_ROUNDS:
        together([partial(site.run, rounds) for site in sites])
        coordinator.kill()
        replay = measure_replay(coordinator.state, directory / "copy")
        seconds, cpu = [], []
        for _ in range(STARTS):
            coordinator.kill()
            seconds.append(coordinator.start())
            cpu.append(coordinator.cpu_seconds())
        rows.append(
            {
                "rounds_since_snapshot": rounds,
                **replay,
                "in_service_seconds": statistics.median(seconds),
                "in_service_seconds_all": seconds,
                "in_service_cpu_seconds": min(cpu),
            }
        )
    coordinator.kill()
    _, layout = read_run(coordinator)
    at = [row["rounds_since_snapshot"] for row in rows]
    took = [row["replay_cpu_seconds"] for row in rows]
    slope, intercept = np.polyfit(at, took, 1)
    residual = np.array(took) - (slope * np.array(at) + intercept)
    return {
        "params": layout.num_parameters,
        "rows": rows,
        "replay_cpu_ms_a_round": 1e3 * slope,
        "replay_r_squared": 1 - float(np.sum(residual**2) / np.sum((took - np.mean(took)) ** 2)),
    }


def measure_replay(state: Path, copy: Path) -> dict[str, float]:
    """Least of three recoveries of a copy, in this process; and the events of the journal.

    In seconds of CPU, too: other load on the machine does not change these much.
    """
    wall, cpu, events = [], [], 0
    for _ in range(3):
        shutil.copytree(state, copy)
        store = Store.open(copy)
        began, cpu_began = time.perf_counter(), time.process_time()
        recover(store)
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - cpu_began)
        events = sum(1 for _ in store.journal.replay(after=0))
        store.close()
        shutil.rmtree(copy)
    return {"events": events, "replay_seconds": min(wall), "replay_cpu_seconds": min(cpu)}


# --- memory -------------------------------------------------------------------------------------


def measure_memory(directory: Path, num_sites: int) -> dict[str, Any]:
    """Peak memory of a coordinator that made the run, over rounds of which half fail for a site."""
    raw = run_of(4.0, rounds=10_000, sites=num_sites, snapshot_every=10)
    coordinator = CoordinatorProcess(directory, raw)
    coordinator.start()
    made = coordinator.memory_mb("VmHWM")
    *well, faulty = members(coordinator, num_sites, "random")
    by_round: dict[int, float] = {}

    def fault(round_: int) -> str:
        by_round[round_] = coordinator.memory_mb("VmRSS")
        return {1: "malformed", 3: "broken off"}.get(round_ % 4, "")

    together(
        [
            *(partial(site.run, MEMORY_ROUNDS) for site in well),
            partial(faulty.run, MEMORY_ROUNDS, fault),
        ]
    )
    _, layout = read_run(coordinator)
    theta_mb = 4 * layout.num_elements / 1e6
    settled = [mb for round_, mb in by_round.items() if round_ >= MEMORY_ROUNDS // 4]
    result = {
        "sites": num_sites,
        "params": layout.num_parameters,
        "theta_mb": theta_mb,
        "goal_mb": 2 * theta_mb + 256,
        "peak_mb_before_the_first_round": made,
        "peak_mb": coordinator.memory_mb("VmHWM"),
        "rss_mb_by_round": {r: by_round[r] for r in sorted(by_round) if r % 10 == 3},
        "rss_growth_mb_from_round_25": settled[-1] - settled[0],
        "rounds": MEMORY_ROUNDS,
        "refused_contributions": faulty.refused,
        "broken_uploads": faulty.broken,
    }
    coordinator.stop()
    return result


# --- an empty round -----------------------------------------------------------------------------


def measure_empty_rounds(directory: Path) -> dict[str, Any]:
    """Time of a round in which 8 sites send no value and train nothing.

    First all push at once, which is the worst that can happen. Then one 10 ms after the other, as
    sites of their own speeds do: what the run waits for is from the last push to the last update.
    """
    raw = run_of(0.02, rounds=10_000, sites=EMPTY_SITES, snapshot_every=1_000)
    raw["quorum"]["min_sites"] = EMPTY_SITES
    coordinator = CoordinatorProcess(directory, raw)
    coordinator.start()
    sites = members(coordinator, EMPTY_SITES, "zero")
    together([partial(site.run, 20) for site in sites])
    cpu, rounds = coordinator.cpu_seconds(), []
    for last in range(70, 20 + EMPTY_ROUNDS + 1, 50):
        start = time.monotonic()
        together([partial(site.run, last) for site in sites])
        rounds.append((time.monotonic() - start) / 50)
    cpu = coordinator.cpu_seconds() - cpu
    waits = staggered_waits(sites, sites[0].round + EMPTY_ROUNDS // 2)
    result = {
        "sites": EMPTY_SITES,
        "rounds": EMPTY_ROUNDS,
        "bytes_a_contribution": len(sites[0].body),
        "ms_a_round": 1e3 * statistics.mean(rounds),
        "ms_a_round_of_the_best_50": 1e3 * min(rounds),
        "coordinator_cpu_ms_a_round": 1e3 * cpu / EMPTY_ROUNDS,
        "ms_after_the_last_of_staggered_pushes": 1e3 * statistics.median(waits),
    }
    coordinator.stop()
    return result


def staggered_waits(sites: list[LightSite], last: int) -> list[float]:
    """Seconds from a round's last push to its last update, until round `last`."""
    first = sites[0].round
    for i, site in enumerate(sites):
        site.pause = (i + 1) * STAGGER_SECONDS
    together([partial(site.run, last) for site in sites])
    return [
        max(site.updated_at[round_] for site in sites)
        - max(site.pushed_at[round_] for site in sites)
        for round_ in range(first + 1, last)
    ]


def measure(directory: Path, parts: list[str]) -> dict[str, Any]:
    """All that was asked for, by name."""
    result: dict[str, Any] = {"load_average_before": os.getloadavg()[0]}
    if "restart" in parts:
        result["restart"] = measure_restart(directory / "restart")
    if "memory" in parts:
        result["memory"] = [measure_memory(directory / f"memory-{n}", n) for n in MEMORY_SITES]
    if "empty" in parts:
        result["empty_round"] = measure_empty_rounds(directory / "empty")
    return {**result, "load_average_after": os.getloadavg()[0]}


def table(result: dict[str, Any]) -> str:
    """The same for people."""
    lines = [
        f"{row['rounds_since_snapshot']:4} rounds since the snapshot: in service after "
        f"{row['in_service_seconds']:.2f} s ({row['in_service_cpu_seconds']:.2f} s of CPU), "
        f"replay {row['replay_cpu_seconds']:.3f} s of CPU"
        for row in result.get("restart", {}).get("rows", ())
    ]
    lines += [
        f"{row['sites']:4} sites: peak {row['peak_mb']:.0f} MB (goal {row['goal_mb']:.0f}), "
        f"growth after round 25 {row['rss_growth_mb_from_round_25']:+.1f} MB"
        for row in result.get("memory", ())
    ]
    if "empty_round" in result:
        empty = result["empty_round"]
        lines.append(
            f"{empty['sites']:4} sites: {empty['ms_a_round']:.1f} ms an empty round, "
            f"{empty['coordinator_cpu_ms_a_round']:.1f} ms of it the coordinator's CPU time; "
            f"{empty['ms_after_the_last_of_staggered_pushes']:.1f} ms after the last push where "
            "sites come one by one"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rounds", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parts = ("restart", "memory", "empty")
    parser.add_argument("--only", choices=parts, action="append", help="one part; may be repeated")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="loco-rounds-") as directory:
        result = measure(Path(directory), options.only or list(parts))
    print(json.dumps(result, indent=1) if options.json else table(result))


if __name__ == "__main__":
    main()
