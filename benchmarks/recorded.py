"""Blocks of benchmarks.tables from what other benchmarks printed with --json.

`loco demo --json` and `python -m benchmarks.wan --json` print what lies in docs/results/,
`python -m benchmarks.overlap` writes it.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loco.layout import Layout
from loco.plan import Setting

WAN_RUNS = (
    "wan_834k_2026-11-30.json", "wan_10m_2026-11-30.json", "wan_10m_cubic_2026-11-30.json",
)  # fmt: skip
WAN_AGAIN = "wan_834k_2026-12-01.json"  # by `make evidence`, on whatever machine that runs
OVERLAP = "overlap_cpu_2026-11-30.jsonl"
DOWNLINK = "downlink_cpu_2026-12-01.jsonl"
DOWNLINK_WAYS = "downlink_ways_cpu_2026-11-30.jsonl"
SCAPE = "scape_cpu_2026-11-30.jsonl"
SCALING = "scaling_cpu_2026-12-01.jsonl"
SCALING_FIT = "scaling_fit_cpu_2026-12-01.jsonl"  # what the constants of loco.plan were fitted to
RESULTS = Path(__file__).parents[1] / "docs/results"


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def lines_of(name: str) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines."""
    text = (RESULTS / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def demo_lines() -> list[str]:
    """Runs of the demo with real processes, one row a command."""
    lines = [
        "| command | bits per byte | up a site and round | down | dense / up | last contribution "
        "| in-site, a rank and step | wall time |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for run in read("demo_cpu_2026-11-30.json"):
        last = run["dense_kb"] / run["last_contribution_kb"]
        lines.append(
            f"| `{run['command']}` | {run['val_bpb_end']:.3f} | {run['up_kb']:,.0f} kB "
            f"| {run['down_kb']:,.0f} kB | {run['dense_kb'] / run['up_kb']:.0f}x "
            f"| {run['last_contribution_kb']:,.1f} kB ({last:.0f}x) | {run['in_site_kb']:,.0f} kB "
            f"| {run['seconds']} s |"
        )
    return lines


def demo_record(command: str, result: dict[str, Any]) -> dict[str, Any]:
    """What the table shows of the object that `loco demo --json` printed; bytes are a site's."""
    sites = result["sites"]
    rounds = result["rounds"]

    def kilobytes(key: str, each: float) -> float:
        return round(sum(site[key] for site in sites) / len(sites) / each / 1e3, 1)

    return {
        "command": command,
        "rounds": rounds,
        "dense_kb": result["dense_bytes_per_round"] / 1e3,
        "val_bpb_end": round(result["val_bpb_end"], 4),
        "up_kb": kilobytes("bytes_up", rounds),
        "down_kb": kilobytes("bytes_down", rounds),
        "last_contribution_kb": kilobytes("contribution_bytes", 1),
        "in_site_kb": kilobytes("in_site_bytes_per_step", 1),
        "seconds": round(result["seconds"]),
    }


def wan_lines() -> list[str]:
    """The exchange over a line of 100 Mbit/s and 50 ms, in two sentences."""
    report = read(WAN_AGAIN)
    seconds = {name: row["sync_seconds"] for name, row in report["methods"].items()}
    return [
        f"Over a line of {report['mbit']:g} Mbit/s and {report['rtt_ms']:g} ms, a round of "
        f"{report['inner_steps']} steps of {report['step_ms']:g} ms, an exchange takes "
        f"{seconds['blocking']:.2f} s (torchft's DiLoCo on the same line: "
        f"{seconds['torchft-bucket']:.2f} s in one bucket, {seconds['torchft-tensor']:.1f} s a "
        f"call a tensor), and {seconds['overlapped']:.2f} s with `outer.delay_steps = "
        f"{report['inner_steps']}`, which hides it behind the next inner steps.",
    ]


def wan_setting(report: dict[str, Any]) -> Setting:
    """What `loco plan` would be asked for a run of benchmarks.wan."""
    return Setting(
        layout=Layout.of([("parameters", (int(report["params"]),))]),
        sites=report["sites"],
        ranks=1,
        k=report["k"],
        k_sites=3,
        bits=2,
        inner_steps=report["inner_steps"],
        fragments=1,
        delay_steps=0,
        step_seconds=report["step_ms"] / 1e3,
        up_mbit=report["mbit"],
        down_mbit=report["mbit"],
        coordinator_mbit=None,
        rtt_ms=report["rtt_ms"],
        congestion=congestion(report),
    )


def congestion(report: dict[str, Any]) -> str:
    """Of the hosts of such a run; where nothing was asked for it was that machine's."""
    return str(report.get("congestion") or "bbr")


def overlap_lines() -> list[str]:
    """What a delay costs: each run against the mean of its seed's two controls."""
    kinds: dict[tuple[str, str, int, bool], list[dict[str, Any]]] = {}
    controls: dict[tuple[str, str], dict[int, list[float]]] = {}
    for run in lines_of(OVERLAP):
        what = (run["method"], run.get("model", "small"))
        kinds.setdefault((*what, run["delay"], run["blind"]), []).append(run)
        if run["delay"] == 0:
            of_seed = controls.setdefault(what, {}).setdefault(run["seed"], [])
            of_seed.append(run["val_bpb_end"])
    lines = [
        "| recipe | model | delay | goes on from | seeds | bits per byte | against waiting |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (method, model, delay, blind), runs in sorted(kinds.items()):
        seeds = len({run["seed"] for run in runs})
        mean = statistics.fmean(run["val_bpb_end"] for run in runs)
        alone = controls[method, model]
        if delay:
            way = "its own end" if blind else "its guess"
            distance = _distance(runs, alone)
        else:
            way, distance = "theta", f"a run alone: +- {_noise(list(alone.values())):.1%}"
        lines.append(
            f"| {method} | {model} | {delay} | {way} | {seeds} | {mean:.4f} | {distance} |"
        )
    return lines


def _distance(runs: list[dict[str, Any]], alone: dict[int, list[float]]) -> str:
    """Mean over seeds, and its standard error."""
    ratios = [run["val_bpb_end"] / statistics.fmean(alone[run["seed"]]) - 1 for run in runs]
    error = statistics.stdev(ratios) / math.sqrt(len(ratios))
    return f"{statistics.fmean(ratios):+.1%} +- {error:.1%}"


def _noise(pairs: list[list[float]]) -> float:
    """Standard deviation of a run, from pairs that differ by a millionth of their initial theta."""
    return math.sqrt(statistics.fmean(((a - b) / a) ** 2 / 2 for a, b in pairs))


@dataclass(frozen=True, order=True, kw_only=True)
class Downlink:
    """Settings of benchmarks.downlink that its page compares."""

    method: str
    bits: int
    exact: bool
    k: int


def downlink_points() -> dict[Downlink, list[dict[str, Any]]]:
    """The runs of each setting, one a seed."""
    found: dict[Downlink, list[dict[str, Any]]] = {}
    for run in lines_of(DOWNLINK):
        at = Downlink(method=run["method"], bits=run["bits"], exact=run["exact"], k=run["k"])
        found.setdefault(at, []).append(run)
    return dict(sorted(found.items()))


def downlink_lines() -> list[str]:
    """Loss by the bits of the update, and what an update in fp32 would have given."""
    lines = [
        "| method | bits a value | k | bits up | bits down | seeds | bits per byte (lowest to "
        "highest) | update in fp32 | coded, against it |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    points = downlink_points()
    for at, runs in points.items():
        if at.exact:
            continue
        losses = {run["seed"]: run["val_bpb_end"] for run in runs}
        exact = {run["seed"]: run["val_bpb_end"] for run in points.get(replace(at, exact=True), [])}
        ratios = [losses[seed] / exact[seed] - 1 for seed in losses.keys() & exact.keys()]
        against = f"{statistics.fmean(ratios):+.1%}" if ratios else ""
        control = f"{statistics.fmean(exact.values()):.3f}" if exact else ""
        up, down = (statistics.fmean(run[f"bits_{way}"] for run in runs) for way in ("up", "down"))
        lines.append(
            f"| {at.method} | {at.bits} | {at.k} | {up:.3f} | {down:.3f} | {len(runs)} "
            f"| {statistics.fmean(losses.values()):.3f} ({min(losses.values()):.3f} to "
            f"{max(losses.values()):.3f}) | {control} | {against} |"
        )
    return lines


def downlink_ways() -> list[str]:
    """Other ways to a small update, as a throw-away script tried them; seed 0."""
    lines = [
        "| R | up: values of 4096 | down | bits up | bits down | bits per byte |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for run in lines_of(DOWNLINK_WAYS):
        highest = run.get("val_bpb_highest")
        risen = f", had risen to {highest:.2f}" if highest else ""
        lines.append(
            f"| {run['sites']} | {run['up']} | {run['down']} | {run['bits_up']:.3f} "
            f"| {run['bits_down']:.3f} | {run['val_bpb_end']:.3f}{risen} |"
        )
    return lines
