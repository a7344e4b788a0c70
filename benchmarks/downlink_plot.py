"""Draw loss against the bits of the update: docs/results/downlink_*.png.

    python -m benchmarks.downlink_plot     # from the lines that benchmarks.downlink wrote

An update in fp32 is the control. It is drawn at the bits that the same settings take when they are
coded, so that the height between two points of a k is what the coding costs.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from benchmarks.picture import save
from benchmarks.recorded import (
    DOWNLINK,
    DOWNLINK_WAYS,
    RESULTS,
    Downlink,
    downlink_points,
    lines_of,
)

Run = dict[str, Any]

CURVES = (
    ("two bits a value", "sparseloco", 2, False, "o-"),
    ("one bit a value", "sparseloco", 1, False, "s-"),
    ("fp32, drawn at the bits of two bits a value", "sparseloco", 2, True, "x:"),
    ("replicas keep what is unsent, two bits a value", "kept", 2, False, "^-"),
)


HIGHEST_LOSS_SHOWN = 3.3  # of the other ways; above it are those that diverge or drift


PICTURE = (RESULTS / DOWNLINK).with_suffix(".png")


def main() -> None:
    mpl.use("Agg")
    save(figure(), PICTURE)


def figure() -> Any:
    """Every way that was tried, and the curves of those that were looked at closely."""
    made, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6))
    ways(left)
    by_bits(right)
    for ax in (left, right):
        ax.set(xlabel="bits down a parameter, round and site", ylabel="held-out bits per byte")
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:g}")
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
    made.tight_layout()
    return made


def ways(ax: Any) -> None:
    """Every way that was tried, one point each: 820,352 parameters, H = 15, 30 rounds."""
    ax.set_title("ways to a small update, 0.82 M parameters, 30 rounds of 15 steps", fontsize=9)
    kinds: dict[tuple[int, bool], list[Run]] = {}
    for run in lines_of(DOWNLINK_WAYS):
        if run["val_bpb_end"] < HIGHEST_LOSS_SHOWN:
            kinds.setdefault((run["sites"], run["down"] == "exact"), []).append(run)
    for (sites, exact), runs in sorted(kinds.items()):
        how = "fp32, drawn at the bits of two bits a value" if exact else "coded"
        marker, fill = {4: "o", 20: "s"}[sites], "none" if exact else "full"
        bits, losses = zip(*((run["bits_down"], run["val_bpb_end"]) for run in runs), strict=True)
        ax.plot(bits, losses, marker, fillstyle=fill, label=f"{sites} sites, {how}")
        for run in runs:
            name = run["up"] if exact else f"{run['up']}: {run['down'].split(';')[0]}"
            place = (run["bits_down"], run["val_bpb_end"])
            ax.annotate(name, place, (4, 4), textcoords="offset points", fontsize=6)


def by_bits(ax: Any) -> None:
    """Curves over k, the mean over seeds with the lowest and the highest."""
    ax.set_title("four sites, 0.12 M parameters, 60 rounds of 10 steps", fontsize=9)
    points = downlink_points()
    for label, method, bits, exact, style in CURVES:
        at = [Downlink(method=method, bits=bits, exact=exact, k=point.k) for point in points]
        ks = sorted(
            {
                point.k for point in at
                if point in points and replace(point, exact=False) in points
            }
        )  # fmt: skip
        if ks:
            curve(ax, ks, Downlink(method=method, bits=bits, exact=exact, k=0), style, label)


def curve(ax: Any, ks: list[int], kind: Downlink, style: str, label: str) -> None:
    """One kind of update over `ks`, at the bits that it takes when it is coded."""
    points = downlink_points()
    coded = [points[replace(kind, exact=False, k=k)] for k in ks]
    down = [fmean(run["bits_down"] for run in runs) for runs in coded]
    losses = [[run["val_bpb_end"] for run in points[replace(kind, k=k)]] for k in ks]
    means = [fmean(values) for values in losses]
    low = [mean - min(values) for mean, values in zip(means, losses, strict=True)]
    high = [max(values) - mean for mean, values in zip(means, losses, strict=True)]
    ax.errorbar(down, means, [low, high], fmt=style, capsize=3, label=label)
    for k, *place in zip(ks, down, means, strict=True):
        if kind.bits > 1 and not kind.exact:  # the others lie close by
            ax.annotate(f"k = {k}", place, (4, 6), textcoords="offset points", fontsize=7)


if __name__ == "__main__":
    main()
