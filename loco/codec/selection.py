"""What a sparse payload says, between the maths and the bytes.

v = Q(TopK(a)) of SparseLoCo (arXiv 2508.15706, section 3) as integers: which positions of which
chunk, which sign, which of the chunk's magnitude levels. Shapes: C chunks, N values sent, M
magnitude levels (1 or 2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loco.codec.rice import Ints

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Codes = npt.NDArray[np.uint16]

LEVEL_BITS = 5  # mantissa bits of a level: steps of 1/32, 4e-5 of relative squared error
LEVEL_SHIFT = 23 - LEVEL_BITS
MAX_LEVEL = (255 << LEVEL_BITS) - 1  # the largest finite one
FIRST_LEVEL = 127 << LEVEL_BITS  # the code of 1.0, from which the first difference counts


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The values that are sent, chunk by chunk, positions ascending."""

    num_elements: int
    chunk: int
    counts: Ints  # [C] values each chunk sends
    positions: Codes  # [N] inside the chunk
    negative: Bools  # [N]
    high: Bools  # [N] takes the upper level; all false where there is one level
    levels: Codes  # [C, M] level codes, low first; 0 where nothing is sent

    @property
    def bits(self) -> int:
        """Bits of a value before coding: 1 (sign) or 2 (sign and level)."""
        return int(self.levels.shape[1])

    @property
    def num_values(self) -> int:
        return len(self.positions)

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


@dataclass(frozen=True, kw_only=True)
class Feedback:
    """What one block's error feedback left behind."""

    selection: Selection
    originals: Floats  # [N] a at the sent indices
    norm_sq: float
    """Sum of squares of the next EF."""
    bad: int
    """First index where a is not finite, -1 if there is none; the rest then ends before it."""


def level_values(codes: Codes) -> Floats:
    """A level code is the upper 8 + LEVEL_BITS bits of a positive fp32 number."""
    return (codes.astype(np.uint32) << LEVEL_SHIFT).view(np.float32)


def chunk_lengths(num_elements: int, chunk: int) -> Ints:
    """Elements of each chunk: the last one may be short.  # [C]"""
    starts = np.arange(0, num_elements, chunk)
    return np.minimum(chunk, num_elements - starts)


def concatenate(parts: list[Selection]) -> Selection:
    """Selections of consecutive ranges of whole chunks as one.

    Empties `parts`, so that only one field at a time is there twice.
    """
    if len(parts) == 1:
        return parts.pop()
    names = "counts", "positions", "negative", "high", "levels"
    chunk, num_elements = parts[0].chunk, sum(part.num_elements for part in parts)
    pieces = {name: [getattr(part, name) for part in parts] for name in names}
    parts.clear()
    joined = {name: np.concatenate(pieces.pop(name)) for name in names}
    return Selection(num_elements=num_elements, chunk=chunk, **joined)
