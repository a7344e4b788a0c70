"""Rice codes, positions and sums over sent values, compiled: the rest of `reference`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import boolean, float32, int64, uint16, uint64

from loco.codec.numba_tools import Scalar, Words, array, constant, entry, lowest_bit
from loco.codec.rice import Ints
from loco.codec.selection import Bools, Codes, Floats

RUNS = (constant(int64), constant(int64))  # counts and Rice parameters
VALUES = (constant(int64), constant(uint16))

_ONE, _SIX, _WORD = np.uint64(1), np.uint64(6), np.uint64(64)


@entry(*((values, boolean, *RUNS, array(uint64), array(uint64)) for values in VALUES))
def pack_runs(
    values: npt.NDArray[np.integer],
    gaps: bool,
    counts: Ints,
    rice: Ints,
    unary: Words,
    fields: Words,
) -> Scalar:
    """Rice codes into zeroed words, each built in a register; the length of the unary part in bits.

    With `gaps`, `values` are ascending positions, and what lies between them is coded.
    """
    u, f, start = np.uint64(0), np.uint64(0), 0
    unary_at, fields_at = np.uint64(0), np.uint64(0)
    unary_word, fields_word = np.uint64(0), np.uint64(0)
    for c in range(len(counts)):
        r = np.uint64(rice[c])
        low_bits = (_ONE << r) - _ONE
        run = values[start : start + counts[c]]
        start += counts[c]
        next_free = np.uint64(0)
        for j in range(len(run)):
            value = np.uint64(run[j])
            if gaps:
                value, next_free = value - next_free, value + _ONE
            u += value >> r
            if u >> _SIX != unary_at:
                unary[unary_at] = unary_word
                unary_at, unary_word = u >> _SIX, np.uint64(0)
            unary_word |= _ONE << (u & np.uint64(63))
            u += _ONE
            field, at = value & low_bits, f & np.uint64(63)
            fields_word |= field << at
            f += r
            if f >> _SIX != fields_at:
                fields[fields_at] = fields_word
                fields_at, fields_word = f >> _SIX, field >> (_WORD - at)
    unary[unary_at] = unary_word
    fields[fields_at] = fields_word
    return u


@entry((constant(uint64), constant(uint64), *RUNS, array(int64)))
def unpack_runs(unary: Words, fields: Words, counts: Ints, rice: Ints, values: Ints) -> None:
    """Inverse of `pack_runs`; `unary` holds as many ones as there are `values`."""
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
