"""Draw the plots of the convergence grid from its JSON lines.

    python -m benchmarks.convergence_plot     # docs/results/convergence_*_cpu_2026-11-30.png

Loss against tokens, bytes and time; loss against k for each H; EF and supports over the rounds.
The clock is that of a model of 1 B parameters whose inner step takes a second, by `loco plan`'s
formulas: a model as small as the one that was trained would wait for nothing but round trips.
"""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from benchmarks.convergence_search import by_density
from benchmarks.convergence_tables import RESULTS, Run, is_main, load
from benchmarks.methods import METHODS, changed, config_of
from benchmarks.picture import save
from benchmarks.simulation import all_reduce_bytes
from loco.layout import Layout
from loco.outer import k_at
from loco.plan import Setting, predict

CLOCK_PARAMS, STEP_SECONDS, RTT_MS, RANKS = 10**9, 1.0, 50.0, 8
SHOWN = (
    "ddp", "ddp-muon", "diloco", "diloco-tuned", "sparseloco", "kept", "kept-5", "kept-5-muon",
    "one-bit",
)  # fmt: skip
LOWEST_LOSS_SHOWN_TO = 3.4  # bits per byte; above it all curves fall alike


def main() -> None:
    mpl.use("Agg")
    for path, figure in figures().items():
        save(figure, path)


def figures() -> dict[Path, Any]:
    """Every picture of the page, by its file."""
    runs = load()
    model = main_model(runs)
    shown = [run for run in runs if is_main(run) and run["model"] == model and run["seed"] == 0]
    shown = [run for name in SHOWN for run in shown if run["method"] == name]
    made = {
        "progress": progress(shown), "bytes": against_bytes(shown), "density": density(),
        "feedback": inside(shown),
    }  # fmt: skip
    return {
        RESULTS.with_name(f"convergence_{name}_cpu_2026-11-30.png"): figure
        for name, figure in made.items()
    }


def main_model(runs: list[Run]) -> str:
    """The model that most runs of the main setting trained."""
    models = [run["model"] for run in runs if is_main(run)]
    return max(set(models), key=models.count)


def progress(runs: list[Run]) -> Any:
    """Loss against tokens and against time at two rates."""
    figure, axes = plt.subplots(1, 3, figsize=(15, 5.4), sharey=True, layout="constrained")
    for run in runs:
        done, losses = curve(run)
        tokens = run["tokens_per_site"] * run["sites"] / run["rounds"] / 1e6
        title = METHODS[run["method"]].title
        axes[0].plot([tokens * r for r in done], losses, marker=".", label=title)
        for ax, mbit in zip(axes[1:], (100.0, 1000.0), strict=True):
            clock = [0.0, *itertools.accumulate(round_seconds(run, mbit))]
            ax.plot([clock[r] / 60 for r in done], losses, marker=".")
    axes[0].set(xlabel="million tokens, all sites", ylabel="held-out bits per byte")
    axes[1].set(xlabel="minutes at 100 Mbit/s (1 B parameters, 1 s a step)", xscale="log")
    axes[2].set(xlabel="minutes at 1 Gbit/s", xscale="log")
    finish(axes)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    return figure


def against_bytes(runs: list[Run]) -> Any:
    """Loss against what a site has sent."""
    figure, ax = plt.subplots(figsize=(8, 6), layout="constrained")
    for run in runs:
        done, losses = curve(run)
        sent = [0.0, *itertools.accumulate(run["traces"]["bytes_up"])]
        label = METHODS[run["method"]].title
        ax.plot([sent[r] / run["params"] for r in done], losses, marker=".", label=label)
    ax.set(
        xlabel="bytes that one site has sent, per parameter",
        xscale="log",
        ylabel="held-out bits per byte",
    )
    finish([ax])
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    return figure


def is_sparse(run: Run) -> bool:
    return METHODS[run["method"]].changes.get("codec.bits") != 32


def density() -> Any:
    """Loss against k for each H, at the same number of inner steps; the mean of the seeds."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    families = (("recipe", "EF beside the replica"), ("kept", "replicas keep what is unsent"))
    for ax, (family, title) in zip(axes, families, strict=True):
        ticks = set[int]()
        for steps, by_k in sorted(by_density()[family].items()):
            points = sorted((k, fmean(s.losses.values())) for k, s in by_k.items())
            if len(points) > 1:
                ax.plot(*zip(*points, strict=True), marker="o", label=f"H = {steps}")
                ticks |= by_k.keys()
        ax.set(xlabel="k, values of 4096", xscale="log", title=title)
        ax.set_xticks(sorted(ticks), [str(k) for k in sorted(ticks)])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
    axes[0].set_ylabel("held-out bits per byte at the end")
    return figure


def inside(runs: list[Run]) -> Any:
    """Norm of error feedback, and how much the sites choose alike."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for run in runs:
        if not is_sparse(run):
            continue
        for ax, name in zip(axes, ("ef_norm", "support_overlap"), strict=True):
            ax.plot(run["traces"][name], label=METHODS[run["method"]].title)
    axes[0].set(xlabel="round", ylabel="L2 norm of error feedback, mean of sites")
    axes[1].set(
        xlabel="round", ylabel="share of sent positions that both sites sent", ylim=(0, None)
    )
    for ax in axes:
        ax.grid(alpha=0.3)
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8
    )
    return figure


def curve(run: Run) -> tuple[list[int], list[float]]:
    """Rounds that were evaluated, and the loss after each."""
    points = sorted((int(r), loss) for r, loss in run["val_bpb"].items() if int(r))
    return [r for r, _ in points], [loss for _, loss in points]


def finish(axes: Any) -> None:
    for ax in axes:
        ax.set_ylim(None, LOWEST_LOSS_SHOWN_TO)
        ax.grid(alpha=0.3)


def round_seconds(run: Run, mbit: float) -> list[float]:
    """Seconds of each round under the plan's formulas, were the model of CLOCK_PARAMS."""
    method = METHODS[run["method"]]
    if method.runner in ("data_parallel", "torchft"):
        times = run["inner_steps"] if method.runner == "data_parallel" else 1
        exchange = times * all_reduce_seconds(run["sites"], mbit)
        return [run["inner_steps"] * STEP_SECONDS + exchange] * run["rounds"]
    base = config_of(
        method, model=run["model"], sites=run["sites"], data="eras", rounds=run["rounds"], seed=0
    )
    config = changed(base, run["changes"])
    outer = config.outer
    turns = (config.inner.steps, outer.fragments, outer.delay_steps)
    setting = (run["sites"], config.codec.bits, *turns, mbit)
    rounds = run["rounds"]
    ks = [k_at(config.codec, round_, rounds) for round_ in range(rounds)]
    return [one_round(k, *setting) for k in ks]


@cache
def one_round(
    k: int, sites: int, bits: int, steps: int, fragments: int, delay: int, mbit: float
) -> float:
    return predict(
        Setting(
            layout=Layout.of([("parameters", (CLOCK_PARAMS,))]), sites=sites, ranks=RANKS, k=k,
            bits=bits, k_sites=sites, inner_steps=steps, fragments=fragments, delay_steps=delay,
            step_seconds=STEP_SECONDS, up_mbit=mbit, down_mbit=mbit, coordinator_mbit=None,
            rtt_ms=RTT_MS,
        )
    ).round_seconds  # fmt: skip


def all_reduce_seconds(sites: int, mbit: float) -> float:
    """A ring over the same links: both directions at once, 2 (R - 1) messages one after another."""
    messages = 2 * (sites - 1)
    sent = all_reduce_bytes(4 * CLOCK_PARAMS, sites)
    return 8 * sent / (mbit * 1e6) + messages * RTT_MS / 2e3


if __name__ == "__main__":
    main()
