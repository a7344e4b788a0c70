"""What a sparse payload says, between the maths and the bytes, and its maths in plain NumPy.

Canonical top-k, then sign and magnitude levels per chunk (`v = Q(TopK(a))`, SparseLoCo, arXiv
2508.15706, section 3). Everything is decided on bit patterns and in exact integers, so that the
NumPy, Numba and Triton paths agree in every bit whatever the order in which they add.

Shapes: C chunks, L elements a chunk, N values sent, M magnitude levels (1 or 2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loco.codec.rice import Ints, as_ints

Floats = npt.NDArray[np.float32]
Patterns = npt.NDArray[np.uint32]

LEVEL_BITS = 5  # mantissa bits of a level: steps of 1/32, 2e-5 of relative squared error
_LEVEL_SHIFT = 23 - LEVEL_BITS
MAX_LEVEL = (255 << LEVEL_BITS) - 1  # the largest finite one
LLOYD_ROUNDS = 2


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The values that are sent, chunk by chunk, positions ascending."""

    num_elements: int
    chunk: int
    bits: int
    counts: Ints  # [C] values each chunk sends
    positions: npt.NDArray[np.uint16]  # [N] inside the chunk
    negative: npt.NDArray[np.bool_]  # [N]
    high: npt.NDArray[np.bool_]  # [N] all false with one level
    levels: npt.NDArray[np.uint16]  # [C, M] level codes, low first; 0 where nothing is sent

    def indices(self) -> Ints:
        """Flat indices, ascending.  # [N] int64"""
        starts = np.arange(len(self.counts)) * self.chunk
        return np.repeat(starts, self.counts) + self.positions

    def values(self) -> Floats:
        """The quantized values.  # [N] fp32"""
        levels = level_values(self.levels)
        magnitudes = np.repeat(levels[:, 0], self.counts)
        if self.bits == 2:
            magnitudes = np.where(self.high, np.repeat(levels[:, 1], self.counts), magnitudes)
        return np.where(self.negative, -magnitudes, magnitudes)


def level_values(codes: npt.NDArray[np.uint16]) -> Floats:
    """A level code is the upper 8 + LEVEL_BITS bits of a positive fp32 number."""
    return (codes.astype(np.uint32) << _LEVEL_SHIFT).view(np.float32)


def magnitudes(a: Floats) -> Patterns:
    """|a| as bit patterns: integers in the order of the numbers; -0.0 becomes 0."""
    return a.view(np.uint32) & np.uint32(0x7FFFFFFF)


def top_k_mask(mag: Patterns, k: Ints) -> npt.NDArray[np.bool_]:  # [C, L], [C] -> [C, L]
    """The k largest of each row, the lowest index first among equals; never a zero.

    A row with fewer than k non-zeros gives all of them. Selects rows of one k together.
    """
    mask = np.zeros(mag.shape, np.bool_)
    for one_k in np.unique(k[k > 0]):
        rows = np.flatnonzero(k == one_k)
        mask[rows] = _top_k_rows(mag[rows], min(int(one_k), mag.shape[1]))
    return mask


def _top_k_rows(mag: Patterns, k: int) -> npt.NDArray[np.bool_]:
    kth = mag.shape[1] - k
    threshold = np.partition(mag, kth, axis=1)[:, kth, None]
    threshold = np.maximum(threshold, 1)
    mask = mag >= threshold
    for row in np.flatnonzero(mask.sum(axis=1) > k):
        ties = np.flatnonzero(mag[row] == threshold[row])
        surplus = int(mask[row].sum()) - k
        mask[row, ties[len(ties) - surplus :]] = False
    return mask


def quantize(
    mag: Patterns, counts: Ints, bits: int
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint16]]:  # [N], [C] -> high [N], levels [C, M]
    """Magnitude levels of each chunk, and which values take the upper one.

    Magnitudes become integers below 2^31 relative to the chunk's largest; group means are integer
    quotients. The first threshold is Lloyd-Max's for an exponential tail above the smallest value,
    min + 1.6 (mean - min); `LLOYD_ROUNDS` rounds then fit it to the chunk.
    """
    levels = np.zeros((len(counts), bits), np.uint16)
    high = np.zeros(len(mag), np.bool_)
    sending = np.flatnonzero(counts)
    if len(sending) == 0:
        return high, levels
    counts = counts[sending]
    starts = np.cumsum(counts) - counts
    largest = np.maximum.reduceat(mag, starts)
    scale = np.ldexp(1.0, 157 - (largest >> 23).astype(np.int32))
    x = (mag.view(np.float32) * np.repeat(scale, counts)).astype(np.int64)
    total = np.add.reduceat(x, starts)
    if bits == 1:
        levels[sending, 0] = level_codes(total // counts, scale)
        return high, levels
    low_mean, high_mean = _two_means(x, counts, starts, total)
    levels[sending, 0] = level_codes(low_mean, scale)
    levels[sending, 1] = level_codes(high_mean, scale)
    lows, highs = level_values(levels[sending]).astype(np.float64).T
    middle = np.repeat((lows + highs) / 2, counts)
    return mag.view(np.float32) > middle, levels


def _two_means(x: Ints, counts: Ints, starts: Ints, total: Ints) -> tuple[Ints, Ints]:
    smallest = np.minimum.reduceat(x, starts)
    threshold = smallest + 8 * (total // counts - smallest) // 5
    for _ in range(LLOYD_ROUNDS):
        above = x > np.repeat(threshold, counts)
        num_high = np.add.reduceat(as_ints(above), starts)
        sum_high = np.add.reduceat(np.where(above, x, 0), starts)
        low_mean = (total - sum_high) // (counts - num_high)
        high_mean = np.where(num_high > 0, sum_high // np.maximum(num_high, 1), low_mean)
        threshold = (low_mean + high_mean) >> 1
    return low_mean, high_mean


def level_codes(mean: Ints, scale: npt.NDArray[np.float64]) -> npt.NDArray[np.uint16]:
    """Nearest level code of `mean / scale`; at least 1, because a sent value is never zero."""
    pattern = as_ints((mean / scale).astype(np.float32).view(np.uint32))
    rounded = (pattern + (1 << (_LEVEL_SHIFT - 1))) >> _LEVEL_SHIFT
    codes: npt.NDArray[np.uint16] = np.clip(rounded, 1, MAX_LEVEL).astype(np.uint16)
    return codes
