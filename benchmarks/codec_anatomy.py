"""What real error-feedback buffers look like, and what other ways to code them would give.

    python -m benchmarks.codec_traces && python -m benchmarks.codec_anatomy

Every line is a question that the lab log ("Codec") answers. k = 64 of 4096 unless it says other.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.codec import entropy, index_bound
from loco import codec
from loco.codec.selection import Selection
from loco.layout import CHUNK, Layout, Parameter

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
K = 64


def selected(a: Floats, k: int = K, bits: int = 2) -> tuple[Selection, Ints]:
    encoded = codec.encode(a, k=k, bits=bits)
    assert encoded.selection is not None
    return encoded.selection, encoded.indices


def gaps_of(positions: Ints, first: npt.NDArray[np.bool_]) -> Ints:
    """Elements skipped before each of ascending positions; `first` starts a chunk."""
    return np.where(first, positions, np.diff(positions, prepend=-1) - 1)


def rice_bits(gaps: Ints, r: int) -> float:
    return float((gaps >> r).mean()) + 1 + r


def golomb_pair_bits(gaps: Ints, half_bits: int) -> float:
    """Golomb with m = floor(sqrt(2^h)), two remainders in h bits: half steps between Rice's."""
    return float((gaps // int(np.sqrt(2.0**half_bits))).mean()) + 1 + half_bits / 2


def index_coding(a: Floats) -> None:
    selection, indices = selected(a)
    chunk = indices // CHUNK
    gaps = gaps_of(indices % CHUNK, np.diff(chunk, prepend=-1) > 0)
    spans = np.maximum.reduceat(indices % CHUNK, np.cumsum(selection.counts) - selection.counts)
    full = np.repeat(spans > CHUNK // 2, selection.counts)  # padded parameters left out
    print(f"index bound {index_bound(K):.3f}, geometric {K_GEOMETRIC:.3f}")
    print(
        f"  Rice, r = 5: {rice_bits(gaps, 5):.3f}; without padded parameters: "
        f"{rice_bits(gaps[full], 5):.3f}"
    )
    print(f"  Golomb with packed pairs, without them: {golomb_pair_bits(gaps[full], 11):.3f}")


K_GEOMETRIC = entropy(K / CHUNK) * CHUNK / K


def information(line: Ints, lines: int) -> float:
    """Bits that knowing the density of each row (or column) would save a value."""
    share = np.bincount(line, minlength=lines) / len(line)
    return float(np.log2(lines) + np.sum(share[share > 0] * np.log2(share[share > 0])))


def clustering(a: Floats, layout: Layout) -> None:
    print("tensor: bits a value saved by knowing row / column densities (chance alone would give)")
    selection, indices = selected(a)
    for p in matrices(layout):
        mine = (indices >= p.start) & (indices < p.start + p.numel)
        rows, columns = np.divmod(indices[mine] - p.start, p.shape[1])
        negative = selection.negative[mine]
        order = np.lexsort((rows, columns))
        same_column = np.diff(columns[order]) == 0
        agree = float((np.diff(negative[order].astype(int)) == 0)[same_column].mean())
        share = float(np.sum(a[p.start : p.start + p.numel] ** 2, dtype=np.float64) / energy(a))
        print(
            f"  {p.name:36} {information(rows, p.shape[0]):.2f} / "
            f"{information(columns, p.shape[1]):.2f}"
            f" ({chance(p.shape[0], len(rows)):.2f} / {chance(p.shape[1], len(rows)):.2f}),"
            f" signs agree in a column {agree:.2f}, energy {share:.3f}"
        )


def chance(lines: int, values: int) -> float:
    """`information` of as many values spread at random."""
    return information(np.random.default_rng(0).integers(0, lines, values), lines)


def matrices(layout: Layout) -> list[Parameter]:
    return [p for p in layout.parameters if len(p.shape) == 2]


def energy(a: Floats) -> float:
    return float(np.sum(a.astype(np.float64) ** 2))


def supports(before: Floats, after: Floats) -> None:
    again = np.isin(selected(after)[1], selected(before)[1]).mean()
    print(f"sent again in the next round: {again:.4f}; at random: {K / CHUNK:.4f}")


def thresholds(a: Floats) -> None:
    print(
        "upper level from min + c (mean - min): c, share, bits of the flag (entropy, Rice), error"
    )
    selection, indices = selected(a)
    magnitudes = np.abs(a[indices]).astype(np.float64).reshape(len(selection.counts), -1)
    smallest, mean = magnitudes.min(1, keepdims=True), magnitudes.mean(1, keepdims=True)
    for c in (1.2, 1.6, 2.0, 2.5, 3.0):
        high = magnitudes > smallest + c * (mean - smallest)
        coded = np.where(high, group_mean(magnitudes, high), group_mean(magnitudes, ~high))
        lost = float(np.sum((magnitudes - coded) ** 2) / np.sum(magnitudes**2))
        share = float(high.mean())
        gaps = np.diff(np.flatnonzero(high), prepend=-1) - 1
        flag = share * min(rice_bits(gaps, r) for r in range(8))
        print(f"  {c:.1f} {share:.3f} {entropy(share):.3f} {flag:.3f} {lost:.5f}")


def group_mean(x: npt.NDArray[np.float64], which: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    return (x * which).sum(1, keepdims=True) / np.maximum(which.sum(1, keepdims=True), 1)


def level_steps(a: Floats) -> None:
    print("mantissa bits of a level: error that rounding adds (squared, relative)")
    selection, _ = selected(a)
    levels = (selection.levels.astype(np.uint32) << 18).view(np.float32).astype(np.float64)
    exact = levels * np.random.default_rng(0).uniform(1, 1 + 2**-5, levels.shape)
    for bits in (3, 4, 5, 6):
        mantissa, exponent = np.frexp(exact)
        rounded = np.ldexp(np.round(mantissa * 2 ** (bits + 1)) / 2 ** (bits + 1), exponent)
        print(f"  {bits}: {float(np.mean((rounded / exact - 1) ** 2)):.1e}")


def equal_bytes(a: Floats) -> None:
    print("at the bytes of k = 64, 2 bits: setting, bytes, energy sent, what is left of everything")
    budget = len(codec.encode(a).payload)
    for bits in (2, 1):
        k = K
        while len(codec.encode(a, k=k + 1, bits=bits).payload) <= budget:
            k += 1
        encoded = codec.encode(a, k=k, bits=bits)
        sent = a[encoded.indices].astype(np.float64)
        lost = float(np.sum((sent - encoded.values) ** 2))
        left = (energy(a) - float(np.sum(sent**2)) + lost) / energy(a)
        share = float(np.sum(sent**2)) / energy(a)
        print(f"  k = {k}, {bits} bits: {len(encoded.payload)}, {share:.4f}, {left:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, default=Path("build/codec-traces"))
    folder: Path = parser.parse_args().traces
    layout = Layout.from_json((folder / "layout.json").read_text())
    before, a = (np.load(folder / f"round-{number:03}.npy") for number in (39, 40))
    index_coding(a)
    clustering(a, layout)
    supports(before, a)
    thresholds(a)
    level_steps(a)
    equal_bytes(a)


if __name__ == "__main__":
    main()
