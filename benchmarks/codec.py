"""The codec's numbers: bits a value, error, speed, memory, each beside its rival.

    python -m benchmarks.codec                     # a table (about a minute on one core)
    python -m benchmarks.codec --json              # one object
    python -m benchmarks.codec --plot codec.svg    # bits against error, ours and the public rule's

Input: Gaussian; Gaussian with a log-normal scale for each chunk; and real error-feedback buffers if
`python -m benchmarks.codec_traces` has left any in build/codec-traces. Times are CPU seconds of one
thread, so that other processes disturb them less; every speed has its rival in the same run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.codec_rivals import public_rule
from benchmarks.codec_speed import measure_memory, measure_speed
from loco import codec
from loco.layout import CHUNK, Layout

SETTINGS = ((32, 2), (64, 1), (64, 2), (128, 1), (128, 2), (256, 2), (1024, 2))
GOALS = {(64, 2): 9.6, (64, 1): 8.8, (128, 2): 8.6, (32, 2): 10.7}
NUM_CHUNKS = 1024  # of the synthetic inputs: one payload of the largest size that the worker makes


def inputs(traces: Path) -> dict[str, tuple[np.ndarray, list[slice]]]:
    """Input by name: flat fp32, and the tensors it consists of."""
    rng = np.random.default_rng(0)
    shape = NUM_CHUNKS, CHUNK
    normal = rng.standard_normal(shape, dtype=np.float32)
    scales = np.exp(rng.standard_normal((NUM_CHUNKS, 1))).astype(np.float32)
    whole = [slice(0, NUM_CHUNKS * CHUNK)]
    found = {"gaussian": (normal.ravel(), whole), "lognormal": ((normal * scales).ravel(), whole)}
    real = traces / "round-040.npy"
    if real.exists():
        layout = Layout.from_json((traces / "layout.json").read_text())
        tensors = [slice(p.start, p.start + p.numel) for p in layout.parameters]
        found["real"] = np.load(real), tensors
    return found


def index_bound(k: int) -> float:
    """Bits an index of k random ones among CHUNK: log2 of the number of choices, over k."""
    i = np.arange(k)
    return float(np.sum(np.log2(CHUNK - i) - np.log2(i + 1))) / k


def entropy(p: float) -> float:
    """Bits of one flag that is set with probability p."""
    return 0.0 if p in (0, 1) else float(-p * np.log2(p) - (1 - p) * np.log2(1 - p))


def measure_bits(a: np.ndarray, tensors: list[slice]) -> list[dict[str, Any]]:
    """One row a setting: bits, bound, squared errors relative to what is sent; ours and theirs."""
    energy = float(np.sum(a.astype(np.float64) ** 2))
    rows = []
    for k, bits in SETTINGS:
        encoded = codec.encode(a, k=k, bits=bits)
        assert encoded.selection is not None
        sent = a[encoded.indices].astype(np.float64)
        theirs = public_rule(sent, encoded.indices, tensors)
        rows.append(
            {
                "k": k,
                "bits": bits,
                "goal": GOALS.get((k, bits)),
                "bits_per_value": 8 * len(encoded.payload) / encoded.num_values,
                "bound": index_bound(k) + 1 + entropy(float(encoded.selection.high.mean())),
                "relative_error": float(np.sum((sent - encoded.values) ** 2) / np.sum(sent**2)),
                "energy_sent": float(np.sum(sent**2)) / energy,
                "bits_per_value_public": 20.0,
                "relative_error_public": float(np.sum((sent - theirs) ** 2) / np.sum(sent**2)),
            }
        )
    return rows


def measure(traces: Path) -> dict[str, Any]:
    """Everything, as `--json` prints it."""
    operations = codec.warm_up()
    memory = measure_memory()  # first: memory that was freed before would be used again unseen
    return {
        "operations": operations,
        "bits_per_value": {name: measure_bits(*given) for name, given in inputs(traces).items()},
        **measure_speed(),
        "peak_extra_bytes_per_input_byte": memory,
    }


def report(found: dict[str, Any]) -> str:
    """The same as text."""
    lines = ["input       k  bits    goal   bits/value  bound   error    public: bits/value  error"]
    for name, rows in found["bits_per_value"].items():
        for r in rows:
            goal = f"{r['goal']:7.1f}" if r["goal"] else "      -"
            lines.append(
                f"{name:9}{r['k']:5}{r['bits']:5} {goal}{r['bits_per_value']:12.3f}"
                f"{r['bound']:8.3f}{r['relative_error']:10.5f}{r['bits_per_value_public']:16.1f}"
                f"{r['relative_error_public']:11.5f}"
            )
    lines += [f"{name}: {value}" for name, value in found.items() if name != "bits_per_value"]
    return "\n".join(lines)


def plot(found: dict[str, Any], path: Path) -> None:
    """Bits a value against relative squared error, for each input."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    colors = {"gaussian": "tab:blue", "lognormal": "tab:orange", "real": "tab:green"}
    for name, rows in found["bits_per_value"].items():
        for bits, marker in ((1, "o"), (2, "s")):
            own = [r for r in rows if r["bits"] == bits and r["k"] <= 256]
            axes.plot(
                [r["bits_per_value"] for r in own],
                [r["relative_error"] for r in own],
                marker=marker, color=colors[name], label=f"loco, {bits} bit, {name}",
            )  # fmt: skip
            for r in own:
                at = r["bits_per_value"], r["relative_error"]
                axes.annotate(f" {r['k']}", at, fontsize=7, color=colors[name])
        theirs = [r for r in rows if r["bits"] == 2 and r["k"] <= 256]
        axes.plot(
            [r["bits_per_value_public"] for r in theirs],
            [r["relative_error_public"] for r in theirs],
            marker="x", linestyle="none", color=colors[name], label=f"public rule, {name}",
        )  # fmt: skip
    axes.set(
        xlabel="bits a sent value, everything included",
        ylabel="squared error relative to what is sent",
        yscale="log",
        title="k of 4096 beside each point",
    )
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, help="write a picture (.svg or .png)")
    parser.add_argument("--traces", type=Path, default=Path("build/codec-traces"))
    options = parser.parse_args()
    found = measure(options.traces)
    if options.plot:
        plot(found, options.plot)
    print(json.dumps(found) if options.json else report(found))


if __name__ == "__main__":
    main()
