"""Error feedback, top-k, quantization and residual in one Triton kernel: one program a chunk.

The same integers and the same fp32 operations as `loco.codec.reference`, so the same bytes; the
k-th largest magnitude is found bit by bit, 31 counts over a chunk that stays in registers. Packing
happens on the host, from what is sent (1/64 of the data). Only `loco.codec.device` imports this
module. It was run under Triton's interpreter and compiled for sm_90; see docs/results for what ran
on a device.
"""

# Triton reads annotations of kernels as its own types, so they have none.
# ruff: noqa: ANN001, ANN202
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from loco.codec.rice import Ints
from loco.codec.selection import Feedback, Selection


@triton.jit
def _code(mean, inverse):
    """Nearest level code of an integer mean times a power of two."""
    pattern = (mean.to(tl.float64) * inverse).to(tl.float32).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum((pattern + (1 << 17)) >> 18, 1), 8159)


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _kernel(
    theta,
    params,
    ef,
    ks,
    positions,
    negative,
    high,
    originals,
    levels,
    counts,
    norms,
    bad,
    beta,
    num_elements,
    chunk,
    most,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    c = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    at = c * chunk + i
    inside = (i < chunk) & (at < num_elements)
    e = tl.load(ef + at, mask=inside, other=0.0)
    t = tl.load(theta + at, mask=inside, other=0.0)
    p = tl.load(params + at, mask=inside, other=0.0)
    a = beta * e + (t - p)
    mag = a.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(mag, axis=0)
    finite = mag * 0 + largest < 0x7F800000  # one answer for the chunk, as a block: a mask
    tl.store(bad + c, (largest >= 0x7F800000).to(tl.int8))

    k = tl.load(ks + c)
    threshold = largest * 0
    for step in tl.static_range(31):
        trial = threshold | (1 << (30 - step))
        reached = tl.sum((mag >= trial).to(tl.int32), axis=0)
        threshold = tl.where(reached >= k, trial, threshold)
    above = mag > threshold
    equal = ((mag == threshold) & (mag > 0)).to(tl.int32)
    spare = k - tl.sum(above.to(tl.int32), axis=0)
    sent = above | ((equal > 0) & (tl.cumsum(equal, axis=0) <= spare))
    sent = sent & finite
    order = tl.cumsum(sent.to(tl.int32), axis=0) - 1
    num = tl.sum(sent.to(tl.int32), axis=0)
    tl.store(counts + c, num)

    scale, inverse = _power_of_two(157 - (largest >> 23)), _power_of_two((largest >> 23) - 157)
    x = (tl.abs(a).to(tl.float64) * scale).to(tl.int64)
    zero = x * 0
    n = tl.maximum(num, 1).to(tl.int64)
    total = tl.sum(tl.where(sent, x, zero), axis=0)
    if BITS == 2:
        smallest = tl.min(tl.where(sent, x, zero + (1 << 31)), axis=0)
        up = sent & (x > 2 * total // n - smallest)
        num_high = tl.sum(up.to(tl.int64), axis=0)
        sum_high = tl.sum(tl.where(up, x, zero), axis=0)
        low_mean = (total - sum_high) // tl.maximum(n - num_high, 1)
        high_mean = tl.where(num_high > 0, sum_high // tl.maximum(num_high, 1), low_mean)
        upper = _code(high_mean, inverse)
        tl.store(levels + 2 * c + 1, tl.where(num > 0, upper, 0).to(tl.int16))
    else:
        up = sent & (mag < 0)
        low_mean = total // n
        upper = _code(low_mean, inverse)
    low = _code(low_mean, inverse)
    tl.store(levels + BITS * c, tl.where(num > 0, low, 0).to(tl.int16))

    level = (tl.where(up, upper, low) << 18).to(tl.float32, bitcast=True)
    left = tl.where(sent, a - tl.where(a < 0, -level, level), a)
    tl.store(ef + at, left, mask=inside & finite)
    tl.store(norms + c, tl.sum(left * left, axis=0))
    out = c * most + order
    tl.store(positions + out, i.to(tl.int16), mask=sent)
    tl.store(negative + out, (a < 0).to(tl.int8), mask=sent)
    tl.store(high + out, up.to(tl.int8), mask=sent)
    tl.store(originals + out, a, mask=sent)


def feedback(
    theta: Tensor, params: Tensor, ef: Tensor, ks: Ints, *, beta: np.float32, bits: int, chunk: int
) -> Feedback:
    """`reference.feedback` for flat tensors on one device; a chunk that is bad stays as it was.

    Device memory: 8 bytes for each value that may be sent.
    """
    num_chunks, most = len(ks), int(ks.max(initial=1))
    room, device = num_chunks * most, ef.device
    positions = torch.empty(room, dtype=torch.int16, device=device)
    flags = torch.empty(2, room, dtype=torch.int8, device=device)
    originals = torch.empty(room, dtype=torch.float32, device=device)
    levels = torch.empty(num_chunks, bits, dtype=torch.int16, device=device)
    counts = torch.empty(num_chunks, dtype=torch.int32, device=device)
    norms = torch.empty(num_chunks, dtype=torch.float32, device=device)
    bad = torch.empty(num_chunks, dtype=torch.int8, device=device)
    lengths = torch.from_numpy(ks.astype(np.int32)).to(device)
    if num_chunks:
        # Without fusion: a multiply-add that rounds once is another number than the CPU's.
        _kernel[(num_chunks,)](
            theta, params, ef, lengths, positions, flags[0], flags[1], originals, levels, counts,
            norms, bad, float(beta), len(ef), chunk, most,
            BITS=bits, BLOCK=triton.next_power_of_2(chunk),
            num_warps=min(32, max(4, chunk // 512)), enable_fp_fusion=False,
        )  # fmt: skip
    filled = counts.cpu().numpy().astype(np.int64)
    taken = (np.arange(most) < filled[:, None]).reshape(-1)
    negative, high = flags.cpu().numpy().astype(np.bool_)[:, taken]
    selection = Selection(
        num_elements=len(ef),
        chunk=chunk,
        counts=filled,
        positions=positions.cpu().numpy().view(np.uint16)[taken],
        negative=negative,
        high=high,
        levels=levels.cpu().numpy().view(np.uint16),
    )
    return Feedback(
        selection=selection,
        originals=originals.cpu().numpy()[taken],
        norm_sq=float(norms.double().sum()),
        bad=_first_bad(theta, params, ef, bad, beta, chunk),
    )


def _first_bad(
    theta: Tensor, params: Tensor, ef: Tensor, bad: Tensor, beta: np.float32, chunk: int
) -> int:
    if not bad.any():
        return -1
    start = int(bad.int().argmax()) * chunk
    cut = slice(start, start + chunk)
    a = float(beta) * ef[cut] + (theta[cut] - params[cut])
    return start + int((~torch.isfinite(a)).int().argmax())
