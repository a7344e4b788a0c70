"""Draw the loss curves that benchmarks.scape_loss printed with --json, one line a run.

    python -m benchmarks.scape_plot     # docs/results/scape_cpu_2026-11-30.png

Runs of seed 0: one site, and two under the outer loop.
"""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from benchmarks.picture import save
from benchmarks.recorded import RESULTS, SCAPE, lines_of

PICTURE = (RESULTS / SCAPE).with_suffix(".png")
LOWEST_STEP = 300  # before that all curves fall alike and would squeeze the rest


def main() -> None:
    mpl.use("Agg")
    save(figure(), PICTURE)


def figure() -> Any:
    """Both settings side by side."""
    runs = lines_of(SCAPE)
    made, axes = plt.subplots(1, 2, figsize=(12, 4.5), sharey=True)
    draw(axes[0], [r for r in runs if not r["inner_steps"]], "one site of 4 ranks")
    draw(axes[1], [r for r in runs if r["inner_steps"]], "2 sites of 2 ranks, averaged every 15")
    axes[0].set_ylabel("held-out nats a byte")
    made.tight_layout()
    return made


def draw(axes: Any, runs: list[dict[str, Any]], title: str) -> None:
    axes.set_prop_cycle(color=plt.get_cmap("tab20").colors)
    for run in [r for r in runs if r["steps"] == 1200 and r["seed"] == 0]:
        points = [(step, nats) for step, nats in run["curve"] if step >= LOWEST_STEP]
        style = "-" if run["optimizer"] == "scape" else "--"
        axes.plot(*zip(*points, strict=True), style, marker=".", label=label(run))
    axes.set_title(title)
    axes.set_xlabel("inner step")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def label(run: dict[str, Any]) -> str:
    """What tells the run from others, and where it ended."""
    name = run["optimizer"]
    if name == "scape":
        name += f" {run['preset']} {100 * run['density']:g} %"
    return f"{name}, lr {run['lr']:g}: {run['validation_nats']:.3f}"


if __name__ == "__main__":
    main()
