"""All sections of a body in one compiled call: `reference.write_sections`.

One call, because after 48 MB have passed through the caches every step of Python waits for memory:
the same in NumPy takes three times as long as it does in a loop that does nothing else.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import boolean, int64, uint16

from loco.codec.numba_tools import Scalar, Words, array, constant, entry, jit
from loco.codec.rice import MAX_RICE, Bytes, Ints
from loco.codec.selection import FIRST_LEVEL, Bools, Codes

SECTIONS = "counts", "low", "spread", "highs", "signs", "drop", "gaps"
_COUNTS, _LOW, _SPREAD, _HIGHS, _SIGNS, _DROP, _GAPS = range(7)
_ONE, _SIX, _WORD = np.uint64(1), np.uint64(6), np.uint64(64)


@jit
def _bit_length(value: Scalar) -> Scalar:
    bits = 0
    while value:
        value >>= 1
        bits += 1
    return bits


@jit
def _gap_rice(count: Scalar, length: Scalar) -> Scalar:
    """`rice.gap_rice` of one chunk."""
    if count == 0:
        return 0
    return _bit_length((64 * (2 * length - count) - 1) // (266 * count))


@jit
def _best_rice(values: Ints) -> Scalar:
    """`rice.best_rice`."""
    num, best, least = len(values), np.int64(0), np.int64(1) << 62
    if num == 0:
        return best
    middle = _bit_length(values.sum() // num)
    for r in range(max(0, middle - 3), min(MAX_RICE, middle + 1) + 1):
        cost = np.int64(r * num)
        for v in values:
            cost += v >> r
        if cost < least:
            best, least = np.int64(r), cost
    return best


@jit
def _signed(delta: Scalar) -> Scalar:
    """`rice.zigzag` of one number."""
    return (delta << 1) ^ (delta >> 63)


@jit
def _pack(
    values: npt.NDArray[np.integer],
    gaps: bool,
    counts: Ints,
    rice: Ints,
    unary: Words,
    fields: Words,
) -> tuple[Scalar, Scalar]:
    """Rice codes, each word built in a register; the lengths of both parts in bits.

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
            while u >> _SIX != unary_at:
                unary[unary_at] = unary_word
                unary_at, unary_word = unary_at + _ONE, np.uint64(0)
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
    return np.int64(u), np.int64(f)


@jit
def _put(
    out: Bytes,
    at: Scalar,
    values: npt.NDArray[np.integer],
    gaps: bool,
    counts: Ints,
    rice: Ints,
    room: Scalar,
) -> Scalar:
    """Length of the unary part, unary part, binary part; where they end. `room`: unary bits."""
    unary = np.empty(room // 64 + 1, np.uint64)
    fields = np.empty((counts * rice).sum() // 64 + 1, np.uint64)
    unary_bits, field_bits = _pack(values, gaps, counts, rice, unary, fields)
    size = (unary_bits + 7) // 8
    for i in range(4):
        out[at + i] = (size >> (8 * i)) & 255
    at += 4
    out[at : at + size] = unary.view(np.uint8)[:size]
    at += size
    size = (field_bits + 7) // 8
    out[at : at + size] = fields.view(np.uint8)[:size]
    return at + size


@jit
def _put_stream(out: Bytes, at: Scalar, values: Ints) -> Scalar:
    r = _best_rice(values)
    room = len(values)
    for v in values:
        room += v >> r
    out[at] = r
    return _put(out, at + 1, values, False, np.full(1, len(values)), np.full(1, r), room)


@jit
def _put_bits(out: Bytes, at: Scalar, flags: Bools) -> Scalar:
    for start in range(0, len(flags), 8):
        part = flags[start : start + 8]
        byte = 0
        for i in range(len(part)):
            byte |= part[i] << i
        out[at] = byte
        at += 1
    return at


@jit
def _high_gaps(high: Bools) -> Ints:
    """Values between those that take the upper level."""
    gaps, num, last = np.empty(high.sum(), np.int64), 0, -1
    for i in range(len(high)):
        if high[i]:
            gaps[num] = i - last - 1
            num, last = num + 1, i
    return gaps


@jit
def _room(num_chunks: Scalar, num_values: Scalar) -> Scalar:
    """Bytes that bound a body: a chunk's four numbers have at most 17 bits and cost at most 3 more,
    a position costs at most 15 + 4 bits, a flag two, a sign one.
    """
    return 64 + num_chunks * 10 + num_values * 3


@jit
def _chunk_numbers(
    num_elements: Scalar,
    chunk: Scalar,
    counts: Ints,
    positions: Codes,
    levels: Codes,
    numbers: Ints,
    rice: Ints,
) -> tuple[Scalar, Scalar, Scalar]:
    """Fill `numbers` [4, C]: counts of all, low, spread and drop of sending chunks; `rice` [C].

    Returns the header's k, the number of sending chunks, and the room for the gaps' unary part.
    """
    sending, room, value, uniform = 0, len(positions), 0, True
    most = counts.max() if len(counts) else np.int64(0)
    last_count, last_level = np.int64(0), np.int64(FIRST_LEVEL)
    for c in range(len(counts)):
        count, length = counts[c], min(chunk, num_elements - c * chunk)
        uniform = uniform and count == min(most, length)
        numbers[0, c] = _signed(count - last_count)
        last_count = count
        rice[c] = 0
        if count == 0:
            continue
        value += count
        span = np.int64(positions[value - 1]) + 1
        rice[c] = _gap_rice(count, span)
        room += span >> rice[c]
        level = np.int64(levels[c, 0])
        numbers[1, sending] = _signed(level - last_level)
        numbers[2, sending] = np.int64(levels[c, -1]) - level
        numbers[3, sending] = _gap_rice(count, length) - rice[c]
        last_level = level
        sending += 1
    return most if uniform else np.int64(0), sending, room


@entry(
    (
        int64,
        int64,
        constant(int64),
        constant(uint16),
        constant(boolean),
        constant(boolean),
        constant(uint16, 2),
        array(int64),
    )
)
def write_body(
    num_elements: Scalar,
    chunk: Scalar,
    counts: Ints,
    positions: Codes,
    negative: Bools,
    high: Bools,
    levels: Codes,
    ends: Ints,
) -> tuple[Scalar, Bytes]:
    """The header's k and the body; `ends` [7] gets where each section ends."""
    numbers, rice = np.empty((4, len(counts)), np.int64), np.empty(len(counts), np.int64)
    k, sending, room = _chunk_numbers(num_elements, chunk, counts, positions, levels, numbers, rice)
    out = np.empty(_room(len(counts), len(positions)), np.uint8)
    at = 0 if k else _put_stream(out, 0, numbers[0])
    ends[_COUNTS] = at
    at = _put_stream(out, at, numbers[1, :sending])
    ends[_LOW] = at
    if levels.shape[1] == 2:
        at = _put_stream(out, at, numbers[2, :sending])
        ends[_SPREAD] = at
        at = _put_stream(out, at, _high_gaps(high))
    else:
        ends[_SPREAD] = at
    ends[_HIGHS] = at
    at = _put_bits(out, at, negative)
    ends[_SIGNS] = at
    at = _put_stream(out, at, numbers[3, :sending])
    ends[_DROP] = at
    at = _put(out, at, positions, True, counts, rice, room)
    ends[_GAPS] = at
    return k, out[:at]
