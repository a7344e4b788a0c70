"""Top-k and quantization of a block of chunks, compiled: `reference.select` and `feedback`.

Top-k of a chunk without a sort: a bound that at least k elements reach leaves few candidates, in
ascending order. The bound is a little less than the last chunk's threshold, because neighbours are
alike; where that fails, the chunk is laid out as rows of columns, and the k-th largest of the
column maxima is one. The threshold is then found by counting candidates.

Indices are unsigned or run over a slice: Numba's test for negative ones stops vectorisation.
Shapes: C chunks of the block, L elements a chunk, N values sent, M magnitude levels.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float32, int64, uint16, uint32

from loco.codec.numba_tools import (
    Patterns,
    Scalar,
    Words,
    array,
    constant,
    count_bits,
    entry,
    jit,
    jit_sum,
    lowest_bit,
    reach_mask,
)
from loco.codec.rice import Ints
from loco.codec.selection import LEVEL_SHIFT, MAX_LEVEL, Bools, Codes, Floats

INFINITE = 0x7F800000
_ABS = np.uint32(0x7FFFFFFF)
_SCALES = np.ldexp(1.0, 157 - np.arange(256))  # by exponent: the largest magnitude is below 2^31
_MARGIN = 1 << 18  # 3 % below the last threshold, which about 1.3 k elements reach
_COLUMNS = 256
_ONE, _WORD = np.uint64(1), np.uint64(64)


@entry((constant(uint32),))
def largest(patterns: Patterns) -> Scalar:
    """The largest pattern, signs dropped."""
    most = np.uint32(0)
    for i in range(len(patterns)):
        pattern = np.uint32(patterns[i] & _ABS)
        most = pattern if pattern > most else most
    return np.int64(most)


@jit
def _count(patterns: Patterns, threshold: Scalar) -> Scalar:
    """How many patterns reach the threshold."""
    t = np.uint32(threshold)
    count = np.uint32(0)
    for i in range(len(patterns)):
        count = np.uint32(count + np.uint32(patterns[i] >= t))
    return np.int64(count)


@jit
def _reach(mag: Patterns, bound: Scalar, masks: Words) -> Scalar:
    """One bit an element: does it reach the bound? Returns how many do."""
    t = np.uint32(bound)
    count = np.uint64(0)
    whole = len(mag) // 64
    for w in range(whole):
        masks[w] = reach_mask(mag, np.uint64(w) * _WORD, t)
        count += count_bits(masks[w])
    if whole < len(masks):
        rest = np.uint64(0)
        tail = mag[whole * 64 :]
        for i in range(len(tail)):
            rest |= np.uint64(np.uint32(tail[i] & _ABS) >= t) << np.uint64(i)
        masks[whole] = rest
        count += count_bits(rest)
    return np.int64(count)


@jit
def _column_maxima(mag: Patterns, columns: Patterns) -> None:
    columns[:] = 0
    width = len(columns)
    for start in range(0, len(mag), width):
        row = mag[start : start + width]
        for c in range(len(row)):
            pattern, old = np.uint32(row[c] & _ABS), columns[c]
            columns[c] = pattern if pattern > old else old


@jit
def _bound(columns: Patterns, k: Scalar, guess: Scalar) -> Scalar:
    """A threshold >= 1 that at least k columns reach, and few more; 1 if fewer are non-zero."""
    low, high, step = np.int64(1), np.int64(INFINITE), np.int64(_MARGIN)
    t = max(guess, low)
    while high - low > 1:
        count = _count(columns, t)
        if count >= k:
            low = t
            if count <= k + (k >> 2):
                break
            t = min(t + step, (t + high) >> 1)
        else:
            high = t
            t = max(t - step, (t + low) >> 1)
        step <<= 1
    return low


@jit
def _positions(masks: Words, found: Patterns) -> None:
    """The set bits, ascending. Four of each word without a branch, which could not be guessed."""
    count = np.uint64(0)
    for w in range(len(masks)):
        mask, start = masks[w], np.uint64(w) * _WORD
        for i in range(4):
            found[count + np.uint64(i)] = start + lowest_bit(mask)
            mask &= mask - _ONE
        at = count + np.uint64(4)
        while mask:
            found[at] = start + lowest_bit(mask)
            mask &= mask - _ONE
            at += _ONE
        count += count_bits(masks[w])


@jit
def _threshold(patterns: Patterns, k: Scalar, low: Scalar, high: Scalar) -> Scalar:
    """What exactly k patterns reach; where equal ones lie across it, the k-th largest itself."""
    while high - low > 1:
        t = (low + high) >> 1
        count = _count(patterns, t)
        if count == k:
            return t
        if count > k:
            low = t
        else:
            high = t
    return low


@jit
def _keep(found: Patterns, patterns: Patterns, threshold: Scalar) -> None:
    """Move to the front what reaches the threshold."""
    t = np.uint32(threshold)
    taken = np.uint64(0)
    for j in range(len(patterns)):
        pattern = patterns[j]
        found[taken] = found[j]
        patterns[taken] = pattern
        taken += np.uint64(pattern >= t)


@jit
def _keep_some(found: Patterns, patterns: Patterns, threshold: Scalar, ties: Scalar) -> None:
    """Move to the front what lies above the threshold, and the first `ties` that are equal."""
    t = np.uint32(threshold)
    taken = np.uint64(0)
    for j in range(len(patterns)):
        pattern = patterns[j]
        tie = pattern == t and ties > 0
        ties -= np.int64(tie)
        found[taken] = found[j]
        patterns[taken] = pattern
        taken += np.uint64(tie or pattern > t)


@jit
def _top_k(
    mag: Patterns,
    k: Scalar,
    guess: Scalar,
    columns: Patterns,
    masks: Words,
    found: Patterns,
    patterns: Patterns,
) -> tuple[Scalar, Scalar]:
    """Canonical top-k of one chunk into `found`, ascending; how many, and the next guess.

    -1 for how many: an element is NaN or infinite, which reaches every bound.
    """
    masks = masks[: (len(mag) + 63) // 64]
    num = _reach(mag, guess, masks)
    if num < k or num > 3 * k + 32:
        columns = columns[: min(len(columns), len(mag))]
        _column_maxima(mag, columns)
        guess = _bound(columns, k, guess)
        num = _reach(mag, guess, masks)
    _positions(masks, found)
    for j in range(num):
        patterns[j] = mag[np.uint64(found[j])] & _ABS
    most = largest(patterns[:num])
    if most >= INFINITE:
        return -1, guess
    if num <= k:
        return num, guess
    t = _threshold(patterns[:num], k, guess, most + 1)
    if _count(patterns[:num], t) == k:
        _keep(found, patterns[:num], t)
    else:
        _keep_some(found, patterns[:num], t, k - _count(patterns[:num], t + 1))
    return k, max(1, t - _MARGIN)


@jit
def _level(mean: Scalar, scale: Scalar, cell: Patterns, real: Floats) -> Scalar:
    """Nearest level code of mean / scale; `cell` and `real` are one cell of memory."""
    real[0] = np.float32(mean / scale)
    code = (np.int64(cell[0]) + (1 << (LEVEL_SHIFT - 1))) >> LEVEL_SHIFT
    return min(max(code, 1), MAX_LEVEL)


@jit
def _value(code: Scalar, cell: Patterns, real: Floats) -> Scalar:
    """The fp32 number that a level code stands for."""
    cell[0] = np.uint32(code) << LEVEL_SHIFT
    return real[0]


@jit
def _quantize(
    num: Scalar,
    most: Scalar,
    magnitudes: Floats,
    x: Ints,
    high: Bools,
    out: Scalar,
    levels: Codes,
    c: Scalar,
    cell: Patterns,
    real: Floats,
) -> None:
    """Levels of chunk c, whose `num` values have `magnitudes`, the largest with pattern `most`.

    Flags go to `high` from `out` on. Whole arrays and unsigned offsets: ten slices a chunk took a
    tenth of the time.
    """
    scale = _SCALES[most >> 23]
    total, smallest = np.int64(0), np.int64(1) << 31
    for j in range(num):
        x[j] = np.int64(np.float64(magnitudes[j]) * scale)
        total += x[j]
        smallest = min(smallest, x[j])
    if levels.shape[1] == 1:
        for j in range(num):
            high[out + j] = False
        levels[c, 0] = _level(total // num, scale, cell, real)
        return
    threshold = 2 * total // num - smallest
    num_high, sum_high = np.int64(0), np.int64(0)
    for j in range(num):
        above = np.int64(x[j] > threshold)
        high[out + j] = above
        num_high += above
        sum_high += x[j] * above
    low_mean = (total - sum_high) // (num - num_high)
    high_mean = sum_high // num_high if num_high else low_mean
    levels[c, 0] = _level(low_mean, scale, cell, real)
    levels[c, 1] = _level(high_mean, scale, cell, real)


@jit
def _emit(
    num: Scalar,
    a: Floats,
    found: Patterns,
    low: Scalar,
    upper: Scalar,
    subtract: bool,
    out: Scalar,
    high: Bools,
    positions: Codes,
    negative: Bools,
    originals: Floats,
) -> None:
    """Write one chunk's values from `out` on; with `subtract`, a becomes a - v."""
    for j in range(num):
        place = np.uint64(found[j])
        value = a[place]
        positions[out + j] = place
        negative[out + j] = value < 0
        if subtract:
            originals[out + j] = value
            level = upper if high[out + j] else low
            a[place] = value + level if value < 0 else value - level


@jit_sum
def _sum_squares(a: Floats) -> Scalar:
    total = np.float32(0)
    for i in range(len(a)):
        total += a[i] * a[i]
    return total


@jit
def _add_feedback(theta: Floats, params: Floats, ef: Floats, beta: Scalar) -> None:
    for i in range(len(ef)):
        ef[i] = beta * ef[i] + (theta[i] - params[i])


@entry(
    (
        constant(float32),
        constant(float32),
        array(float32),
        float32,
        boolean,
        constant(int64),
        int64,
        array(int64),
        array(uint16),
        array(boolean),
        array(boolean),
        array(float32),
        array(uint16, 2),
    )
)
def run_block(
    theta: Floats,
    params: Floats,
    a: Floats,
    beta: Scalar,
    subtract: bool,
    ks: Ints,
    chunk: Scalar,
    counts: Ints,
    positions: Codes,
    negative: Bools,
    high: Bools,
    originals: Floats,
    levels: Codes,
) -> tuple[Scalar, Scalar, Scalar]:
    """All chunks of a block: how many values, the sum of squares that remains, and -1.

    With `subtract`, `a` arrives as EF and leaves as the next EF; without, it is only read, and
    `theta`, `params` and `originals` are not used. A chunk that is not finite ends the work: its
    number then stands in the place of -1.
    """
    kept = min(chunk, ks.max())
    width = _COLUMNS
    while width < 3 * kept:
        width *= 2
    columns = np.empty(min(width, chunk), np.uint32)
    masks = np.empty((chunk + 63) // 64, np.uint64)
    found, patterns = np.empty(chunk + 4, np.uint32), np.empty(chunk + 4, np.uint32)
    magnitudes = patterns.view(np.float32)
    x, cell = np.empty(kept, np.int64), np.empty(1, np.uint32)
    real = cell.view(np.float32)
    guess, out, norm_sq = np.int64(INFINITE), 0, 0.0
    counts[:], levels[:] = 0, 0
    for c in range(len(ks)):
        start, stop = c * chunk, min((c + 1) * chunk, len(a))
        part = a[start:stop]
        if subtract:
            _add_feedback(theta[start:stop], params[start:stop], part, beta)
        mag, k = part.view(np.uint32), min(ks[c], stop - start)
        if k > 0:
            num, guess = _top_k(mag, k, guess, columns, masks, found, patterns)
        else:
            num = 0 if largest(mag) < INFINITE else -1
        if num < 0:
            return out, norm_sq, c
        if num > 0:
            n, at = np.uint64(num), np.uint64(out)
            most = largest(patterns[:num])
            _quantize(n, most, magnitudes, x, high, at, levels, np.uint64(c), cell, real)
            low, upper = _value(levels[c, 0], cell, real), _value(levels[c, -1], cell, real)
            _emit(n, part, found, low, upper, subtract, at, high, positions, negative, originals)
            counts[c] = num
            out += num
        if subtract:
            norm_sq += np.float64(_sum_squares(part))
    return out, norm_sq, -1
