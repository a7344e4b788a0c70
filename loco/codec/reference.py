"""The codec's operations in plain NumPy: the reference, and what runs where Numba does not.

Everything is decided on bit patterns and in exact integers, and fp32 sums have one order, so that
`loco.codec.kernels` can agree in every bit. Work is cut in blocks of `BLOCK_ELEMENTS`; what comes
out does not depend on it.

Shapes: C chunks, L elements a chunk, N values sent, M magnitude levels (1 or 2).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from loco.codec.rice import Bytes, Ints, as_ints, best_rice, differences, gap_rice, zigzag
from loco.codec.selection import (
    FIRST_LEVEL,
    LEVEL_SHIFT,
    MAX_LEVEL,
    Bools,
    Codes,
    Feedback,
    Floats,
    Selection,
    chunk_lengths,
)

BLOCK_ELEMENTS = 1 << 16  # 256 KiB of fp32: the temporaries of a block stay in cache

Patterns = npt.NDArray[np.uint32]

_SLICE = 1 << 14  # values that are packed at a time


def first_non_finite(a: Floats) -> int:
    """The first index that is NaN or infinite; -1 if there is none."""
    finite = np.isfinite(a)
    return -1 if finite.all() else int(np.argmin(finite))


def feedback(
    theta: Floats, params: Floats, ef: Floats, ks: Ints, *, beta: np.float32, bits: int, chunk: int
) -> Feedback:
    """a = beta * ef + (theta - params), select, and leave a - v in `ef`.

    Where a is not finite, `ef` may be left as a, from that chunk on untouched or not.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(beta * ef, theta - params, out=ef)
    bad = first_non_finite(ef)
    if bad >= 0:
        ks = np.zeros_like(ks)
    selection = select(ef, ks, bits=bits, chunk=chunk)
    sent = selection.indices()
    originals = ef[sent]
    ef[sent] = originals - selection.values()
    with np.errstate(over="ignore"):
        norm_sq = 0.0 if bad >= 0 else float(np.dot(ef, ef))
    return Feedback(selection=selection, originals=originals, norm_sq=norm_sq, bad=bad)


def select(a: Floats, ks: Ints, *, bits: int, chunk: int) -> Selection:
    """Canonical top-k and quantization of finite `a`: whole chunks, the last may be short."""
    mag = a.view(np.uint32) & np.uint32(0x7FFFFFFF)  # integers in the order of |a|; -0.0 is 0
    whole = len(a) // chunk
    full = whole * chunk
    mask = np.empty(len(a), np.bool_)
    mask[:full] = top_k_mask(mag[:full].reshape(whole, chunk), ks[:whole]).reshape(-1)
    mask[full:] = top_k_mask(mag[None, full:], ks[whole:]).reshape(-1)
    sent = np.flatnonzero(mask)
    counts = np.bincount(sent // chunk, minlength=len(ks))
    high, levels = quantize(mag[sent], counts, bits)
    return Selection(
        num_elements=len(a),
        chunk=chunk,
        counts=counts,
        positions=(sent % chunk).astype(np.uint16),
        negative=a[sent] < 0,
        high=high,
        levels=levels,
    )


def top_k_mask(mag: Patterns, ks: Ints) -> Bools:  # [C, L], [C] -> [C, L]
    """The k largest of each row, the lowest index first among equals; never a zero.

    A row with fewer than k non-zeros gives all of them.
    """
    mask = np.zeros(mag.shape, np.bool_)
    for k in np.unique(ks[ks > 0]):
        rows = np.flatnonzero(ks == k)
        mask[rows] = _top_k_rows(mag[rows], min(int(k), mag.shape[1]))
    return mask


def _top_k_rows(mag: Patterns, k: int) -> Bools:
    kth = mag.shape[1] - k
    threshold = np.maximum(np.partition(mag, kth, axis=1)[:, kth, None], 1)
    mask = mag >= threshold
    for row in np.flatnonzero(mask.sum(axis=1) > k):
        ties = np.flatnonzero(mag[row] == threshold[row])
        surplus = int(mask[row].sum()) - k
        mask[row, ties[len(ties) - surplus :]] = False
    return mask


def quantize(mag: Patterns, counts: Ints, bits: int) -> tuple[Bools, Codes]:  # [N], [C]
    """Which values take the upper level ([N]), and the level codes of each chunk ([C, M]).

    Magnitudes become integers below 2^31, relative to the largest of the chunk. The upper level is
    for those that lie twice as far above the smallest as the mean does; levels are the means of
    the two groups. Lloyd-Max would put the threshold at 1.6 instead of 2, for a 20 % smaller error
    and a quarter of a bit a value more under the Rice code: the wrong side of the exchange.
    """
    levels = np.zeros((len(counts), bits), np.uint16)
    high = np.zeros(len(mag), np.bool_)
    sending = np.flatnonzero(counts)
    if len(sending) == 0:
        return high, levels
    counts = counts[sending]
    starts = np.cumsum(counts) - counts
    scale = np.ldexp(1.0, 157 - (np.maximum.reduceat(mag, starts) >> 23).astype(np.int32))
    x = (mag.view(np.float32) * np.repeat(scale, counts)).astype(np.int64)
    total = np.add.reduceat(x, starts)
    if bits == 1:
        levels[sending, 0] = _level_codes(total // counts, scale)
        return high, levels
    threshold = 2 * total // counts - np.minimum.reduceat(x, starts)
    high = x > np.repeat(threshold, counts)
    num_high = np.add.reduceat(as_ints(high), starts)
    sum_high = np.add.reduceat(np.where(high, x, 0), starts)
    low_mean = (total - sum_high) // (counts - num_high)
    high_mean = np.where(num_high > 0, sum_high // np.maximum(num_high, 1), low_mean)
    levels[sending, 0] = _level_codes(low_mean, scale)
    levels[sending, 1] = _level_codes(high_mean, scale)
    return high, levels


def _level_codes(mean: Ints, scale: npt.NDArray[np.float64]) -> Codes:
    """Nearest level code of `mean / scale`; at least 1, because a sent value is never zero."""
    pattern = as_ints((mean / scale).astype(np.float32).view(np.uint32))
    rounded = (pattern + (1 << (LEVEL_SHIFT - 1))) >> LEVEL_SHIFT
    codes: Codes = np.clip(rounded, 1, MAX_LEVEL).astype(np.uint16)
    return codes


def _uniform_k(selection: Selection, lengths: Ints) -> int:
    """The k for which every chunk sends min(k, its length); 0 if there is none."""
    k = int(selection.counts.max(initial=0))
    return k if np.array_equal(selection.counts, np.minimum(k, lengths)) else 0


def write_sections(selection: Selection) -> tuple[int, dict[str, bytes]]:
    """The header's k, and the sections of the body by name, in order."""
    counts = selection.counts
    lengths = chunk_lengths(selection.num_elements, selection.chunk)
    sending = np.flatnonzero(counts)
    levels = as_ints(selection.levels[sending])
    k = _uniform_k(selection, lengths)
    sections = {}
    if not k:
        sections["counts"] = _stream(zigzag(differences(counts, 0)))
    sections["low"] = _stream(zigzag(differences(levels[:, 0], FIRST_LEVEL)))
    if selection.bits == 2:
        sections["spread"] = _stream(levels[:, 1] - levels[:, 0])
        sections["highs"] = _stream(differences(np.flatnonzero(selection.high), -1) - 1)
    sections["signs"] = np.packbits(selection.negative, bitorder="little").tobytes()
    ends = np.cumsum(counts)[sending]
    spans = np.zeros_like(counts)
    spans[sending] = selection.positions[ends - 1] + np.int64(1)
    rice = gap_rice(counts, spans)
    sections["drop"] = _stream((gap_rice(counts, lengths) - rice)[sending])
    sections["gaps"] = _framed(pack_gaps(selection.positions, counts, rice))
    return k, sections


def _stream(values: Ints) -> bytes:
    r = best_rice(values)
    codes = pack(values, np.array([len(values)]), np.array([r]))
    return bytes([r]) + _framed(codes)


def _framed(codes: tuple[bytes, bytes]) -> bytes:
    unary, fields = codes
    return len(unary).to_bytes(4, "little") + unary + fields


def pack(values: npt.NDArray[np.integer], counts: Ints, rice: Ints) -> tuple[bytes, bytes]:
    """Unary and binary parts of Rice codes: runs of `counts[i]` values with parameter `rice[i]`."""
    widths = np.repeat(rice.astype(np.uint8), counts)
    unary, fields = _BitString(), _BitString()
    for start in range(0, len(values), _SLICE):
        v = as_ints(values[start : start + _SLICE])
        width = as_ints(widths[start : start + _SLICE])
        ends = np.cumsum((v >> width) + 1) - 1
        bits = np.zeros(ends[-1] + 1, np.uint8)
        bits[ends] = 1
        unary.append(bits)
        starts = np.cumsum(width) - width
        bit = np.arange(int(width.sum())) - np.repeat(starts, width)
        fields.append(((np.repeat(v, width) >> bit) & 1).astype(np.uint8))
    return unary.to_bytes(), fields.to_bytes()


def pack_gaps(positions: Codes, counts: Ints, rice: Ints) -> tuple[bytes, bytes]:
    """`pack` of the elements skipped before each position; they start anew in each chunk."""
    gaps = positions.copy()
    gaps[1:] -= positions[:-1] + np.uint16(1)
    first = (np.cumsum(counts) - counts)[counts > 0]
    gaps[first] = positions[first]
    return pack(gaps, counts, rice)


class _BitString:
    """Bits that are packed as they come, so that one slice at a time takes a byte a bit."""

    def __init__(self) -> None:
        self._packed: list[bytes] = []
        self._rest: Bytes = np.zeros(0, np.uint8)

    def append(self, bits: Bytes) -> None:
        bits = np.concatenate([self._rest, bits])
        whole = len(bits) & ~7
        self._packed.append(np.packbits(bits[:whole], bitorder="little").tobytes())
        self._rest = bits[whole:]

    def to_bytes(self) -> bytes:
        return b"".join(self._packed) + np.packbits(self._rest, bitorder="little").tobytes()


def unpack(unary: Bytes, fields: Bytes, counts: Ints, rice: Ints) -> Ints:
    """Inverse of `pack`: `unary` must hold as many ones as `counts` say, `fields` all bits."""
    ends = np.flatnonzero(np.unpackbits(unary, bitorder="little"))
    values = np.diff(ends, prepend=-1)
    del ends
    values -= 1
    widths = np.repeat(rice.astype(np.uint8), counts)
    starts = np.cumsum(widths, dtype=np.int64) - widths
    padded = np.concatenate([fields, np.zeros(4, np.uint8)])
    low = np.zeros(len(values), np.int64)
    for i in range(4):
        low |= padded[(starts >> 3) + i].astype(np.int64) << (8 * i)
    low >>= starts & 7
    low &= (1 << widths.astype(np.int64)) - 1
    values <<= widths
    values |= low
    return values


def place(gaps: Ints, counts: Ints, lengths: Ints) -> Codes | None:  # [N], [C], [C]
    """Positions from gaps, which start anew in each chunk; None if one falls outside its chunk."""
    ends = np.cumsum(gaps + 1)
    sending = counts[counts > 0]
    first = np.cumsum(sending) - sending
    before = np.repeat(ends[first] - gaps[first] - 1, sending)
    positions = ends - before - 1
    if (positions >= np.repeat(lengths, counts)).any():
        return None
    codes: Codes = positions.astype(np.uint16)
    return codes


def add(acc: Floats, weight_acc: Floats | None, weight: np.float32, selection: Selection) -> None:
    """acc[indices] += weight * values; weight_acc[indices] += weight."""
    indices = selection.indices()
    acc[indices] += weight * selection.values()
    if weight_acc is not None:
        weight_acc[indices] += weight
