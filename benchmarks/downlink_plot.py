"""Draw loss against the bits of the update: docs/results/downlink_*.png.

    python -m benchmarks.downlink_plot     # from the lines that benchmarks.downlink wrote

An update in fp32 is the control. It is drawn at the bits that the same settings take when they are
coded, so that the height between two points of a k is what the coding costs.
"""

from __future__ import annotations

from statistics import fmean

import matplotlib as mpl
import matplotlib.pyplot as plt

from benchmarks.recorded import DOWNLINK, RESULTS, downlink_points

CURVES = (
    ("two bits a value", "sparseloco", 2, False, "o-"),
    ("one bit a value", "sparseloco", 1, False, "s-"),
    ("fp32, drawn at the bits of two bits a value", "sparseloco", 2, True, "x:"),
    ("replicas keep what is unsent, two bits a value", "kept", 2, False, "^-"),
)


def main() -> None:
    mpl.use("Agg")
    points = downlink_points()
    figure, ax = plt.subplots(figsize=(7.5, 4.6))
    for label, method, bits, exact, style in CURVES:
        by_k = {
            at.k: runs for at, runs in points.items()
            if (at.method, at.bits, at.exact) == (method, bits, exact)
        }  # fmt: skip
        coded = {
            at.k: fmean(run["bits_down"] for run in runs) for at, runs in points.items()
            if (at.method, at.bits, at.exact) == (method, bits, False)
        }  # fmt: skip
        ks = sorted(by_k.keys() & coded.keys())
        if not ks:
            continue
        losses = [[run["val_bpb_end"] for run in by_k[k]] for k in ks]
        means = [fmean(values) for values in losses]
        spread = [
            [mean - min(values) for mean, values in zip(means, losses, strict=True)],
            [max(values) - mean for mean, values in zip(means, losses, strict=True)],
        ]
        ax.errorbar([coded[k] for k in ks], means, spread, fmt=style, capsize=3, label=label)
        for k, mean in zip(ks, means, strict=True):
            if bits == 2 and not exact:
                ax.annotate(f"k = {k}", (coded[k], mean), (4, 6), textcoords="offset points")
    ax.set(xlabel="bits down a parameter, round and site", ylabel="held-out bits per byte")
    ax.set_xscale("log", base=2)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig((RESULTS / DOWNLINK).with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
