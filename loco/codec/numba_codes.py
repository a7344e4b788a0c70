"""Reading Rice codes and positions, adding sent values, compiled: see `reference`."""

from __future__ import annotations

import numpy as np
from numba import boolean, float32, int64, uint16, uint64

from loco.codec.numba_tools import Scalar, Words, array, constant, entry, lowest_bit
from loco.codec.rice import Ints
from loco.codec.selection import Bools, Codes, Floats

_ONE, _SIX, _WORD = np.uint64(1), np.uint64(6), np.uint64(64)


@entry((constant(uint64), constant(uint64), constant(int64), constant(int64), array(int64)))
def unpack_runs(unary: Words, fields: Words, counts: Ints, rice: Ints, values: Ints) -> None:
    """Inverse of `reference.pack`; `unary` holds as many ones as there are `values`."""
    w, i, f, last = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
    mask = unary[0]
    for c in range(len(counts)):
        r = np.uint64(rice[c])
        low_bits = (_ONE << r) - _ONE
        for _ in range(counts[c]):
            while mask == 0:
                w += _ONE
                mask = unary[w]
            end = w * _WORD + lowest_bit(mask)
            mask &= mask - _ONE
            at = f & np.uint64(63)
            field = fields[f >> _SIX] >> at
            if at + r > _WORD:
                field |= fields[(f >> _SIX) + _ONE] << (_WORD - at)
            f += r
            values[i] = ((end - last) << r) | (field & low_bits)
            i += _ONE
            last = end + _ONE


@entry((constant(int64), constant(int64), constant(int64), array(uint16)))
def place_chunks(gaps: Ints, counts: Ints, lengths: Ints, positions: Codes) -> bool:
    start = 0
    for c in range(len(counts)):
        end = start + counts[c]
        run, out = gaps[start:end], positions[start:end]
        position = np.int64(-1)
        for j in range(len(run)):
            position += run[j] + 1
            out[j] = position
        if position >= lengths[c]:
            return False
        start = end
    return True


@entry(
    (
        array(float32),
        array(float32),
        boolean,
        float32,
        constant(int64),
        int64,
        constant(uint16),
        constant(boolean),
        constant(boolean),
        constant(float32, 2),
    )
)
def add_chunks(
    acc: Floats,
    weight_acc: Floats,
    weighted: bool,
    weight: Scalar,
    counts: Ints,
    chunk: Scalar,
    positions: Codes,
    negative: Bools,
    high: Bools,
    levels: Floats,
) -> None:
    """acc += weight * values and, if `weighted`, weight_acc += weight, where values are sent.

    Both in one loop, because most of the time goes into waiting for lines of memory: two at once.
    """
    out = np.uint64(0)
    for c in range(len(counts)):
        low, upper = weight * levels[c, 0], weight * levels[c, -1]
        part = acc[c * chunk : (c + 1) * chunk]
        weight_part = weight_acc[c * chunk : (c + 1) * chunk]
        for _ in range(counts[c]):
            place = np.uint64(positions[out])
            value = upper if high[out] else low
            part[place] += -value if negative[out] else value
            if weighted:
                weight_part[place] += weight
            out += _ONE
