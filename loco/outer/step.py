"""The coordinator's outer step (SparseLoCo, arXiv 2508.15706, eq. 1-4; DESIGN, "The equations").

    g     = sum_r w_r v_r / sum_r w_r         per coordinate over all sites, or over its senders
    u     = alpha * g                         or alpha * Nesterov momentum of g
    s     = s + u ;  d = Q'(TopK'(s)) ;  s = s - d
    theta = theta - d

It runs cell by cell (at most 4 Mi elements), so that memory does not grow with the model or with
the number of sites. Contributions are added in the order given: callers sort by site, and the
result then does not depend on the order of arrival, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from loco import codec
from loco.layout import CHUNK

Array = npt.NDArray[np.float32]

CELLS_A_THREAD = 8
"""A thread more for each so many cells: what they hold, about 80 MB each, stays below theta."""


@dataclass(frozen=True, kw_only=True)
class OuterRules:
    """The part of the config that the outer step obeys."""

    aggregation: Literal["mean_contributors", "mean", "nesterov"]
    alpha: float
    momentum: float
    bits: int  # of the update; 32 = dense


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one site sends for a range of a cell."""

    start: int  # first element within the cell
    num_elements: int
    weight: float  # share of the round's tokens
    scale: float  # at most 1: clipping of contributions that are larger than their peers
    payload: bytes


def reducing_threads(num_cells: int, cores: int) -> int:
    """Threads that share the cells of a model; each cell has an outer step of its own."""
    return min(cores, 1 + num_cells // CELLS_A_THREAD)


def outer_step(
    rules: OuterRules,
    pieces: Iterable[Piece],
    *,
    theta: Array,  # [n] fp32, changed in place
    residual: Array,  # [n] fp32, s: the coordinator's error feedback, changed in place
    momentum: Array | None,  # [n] fp32, changed in place where sites sent; `nesterov` only
) -> bytes:
    """Aggregate one cell, make its part of the update, apply it to theta; return the payload."""
    total, weight_sum = _accumulate(pieces, theta.size)
    # As many values a chunk as sites sent different coordinates of it: halving that costs 8 % of
    # loss, more gains nothing (measured: docs/lab-log.md).
    union = np.count_nonzero(weight_sum.reshape(-1, CHUNK), axis=1)  # [n / 4096]
    if rules.bits == codec.DENSE_BITS:
        payload = codec.encode_dense(_step(rules, total, weight_sum, momentum)).payload
    else:
        # Of chunks of which nothing came, another fragment's, only zeros are read.
        sent = slice(None) if union.all() else union > 0
        velocity_CL = None if momentum is None else momentum.reshape(-1, CHUNK)
        total, weight_sum = (a.reshape(-1, CHUNK)[sent] for a in (total, weight_sum))
        step = _step(rules, total, weight_sum, velocity_CL, sent)
        del total, weight_sum  # a cell's arrays are 16 MB each, and encoding is the peak
        payload = _encode(rules, step, union, residual)
    apply_update(theta, payload)
    return payload


def apply_update(
    theta: Array, payload: bytes | memoryview, *, cell_elements: int | None = None, start: int = 0
) -> None:
    """theta <- theta - d; the same arithmetic at the coordinator and every site.

    `theta` [n] fp32 is the cell that the payload describes, or n elements of it from `start` on,
    where `cell_elements` is the size of the whole cell.
    """
    update = codec.decode(payload, cell_elements or theta.size)
    first, last = np.searchsorted(update.indices, (start, start + theta.size))
    theta[update.indices[first:last] - start] -= update.values[first:last]


def _accumulate(pieces: Iterable[Piece], size: int) -> tuple[Array, Array]:
    total = np.zeros(size, np.float32)  # sum of w_r v_r
    weight_sum = np.zeros(size, np.float32)  # sum of w_r over the senders of each coordinate
    for piece in pieces:
        here = slice(piece.start, piece.start + piece.num_elements)
        if piece.scale == 1.0:
            codec.decode_add(
                piece.payload, total[here], weight=piece.weight, weight_acc=weight_sum[here]
            )
        else:
            _add_scaled(piece, total[here], weight_sum[here])
    return total, weight_sum


def _add_scaled(piece: Piece, total: Array, weight_sum: Array) -> None:
    """A clipped contribution: smaller values, the same weight."""
    sent = codec.decode(piece.payload, piece.num_elements)
    total[sent.indices] += np.float32(piece.weight * piece.scale) * sent.values
    weight_sum[sent.indices] += np.float32(piece.weight)


def _step(
    rules: OuterRules,
    total: Array,
    weight_sum: Array,
    momentum: Array | None,
    rows: slice | npt.NDArray[np.bool_] = slice(None),
) -> Array:
    """u [the shape of `total`] fp32, of those `rows` of the momentum that `total` holds.

    `nesterov` is DiLoCo's outer optimizer (arXiv 2311.08105): SGD with Nesterov momentum, torch's
    form.
    """
    if rules.aggregation != "nesterov":
        return _mean(rules, total, weight_sum)
    assert momentum is not None
    velocity = momentum[rows]
    velocity *= np.float32(rules.momentum)
    velocity += total
    momentum[rows] = velocity
    return np.float32(rules.alpha) * (total + np.float32(rules.momentum) * velocity)


def _mean(rules: OuterRules, total: Array, weight_sum: Array) -> Array:
    """alpha * g, in the place of `total`."""
    if rules.aggregation == "mean_contributors":
        np.divide(total, weight_sum, out=total, where=weight_sum > 0)
    total *= np.float32(rules.alpha)
    return total


def _encode(rules: OuterRules, step: Array, union: npt.NDArray[np.int64], residual: Array) -> bytes:
    """`step` [S, 4096] of those S chunks whose `union` is not zero; `residual` is changed there."""
    sent = union > 0
    residual_CL = residual.reshape(-1, CHUNK)
    if sent.all():
        residual_CL += step
        update = codec.encode(residual, k=union, bits=rules.bits)
    else:
        step += residual_CL[sent]
        residual_CL[sent] = step
        update = codec.encode_chunks(step, active=sent, k=union[sent], bits=rules.bits)
    residual[update.indices] -= update.values
    return update.payload
