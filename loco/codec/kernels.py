"""The operations of `loco.codec.reference`, compiled by Numba: same arguments, same bits.

Importing this module compiles, or loads from Numba's cache; only `loco.codec.backend.warm_up` does,
so nobody waits for a compiler unasked. Numba does not check bounds: what comes from the network
is checked before it gets here.
"""

from __future__ import annotations

import numpy as np

from loco.codec import reference
from loco.codec.numba_codes import (
    add_chunks,
    place_chunks,
    unpack_runs,
)
from loco.codec.numba_select import INFINITE, largest, run_block
from loco.codec.numba_tools import Words
from loco.codec.numba_write import SECTIONS, write_body
from loco.codec.rice import Bytes, Ints
from loco.codec.selection import Codes, Feedback, Floats, Selection, level_values

BLOCK_ELEMENTS = 1 << 22  # bounds nothing but the arrays of what is sent


def first_non_finite(a: Floats) -> int:
    return -1 if largest(a.view(np.uint32)) < INFINITE else reference.first_non_finite(a)


def feedback(
    theta: Floats, params: Floats, ef: Floats, ks: Ints, *, beta: np.float32, bits: int, chunk: int
) -> Feedback:
    return _run(theta, params, ef, ks, beta=beta, bits=bits, chunk=chunk, subtract=True)


def select(a: Floats, ks: Ints, *, bits: int, chunk: int) -> Selection:
    zero, a = np.float32(0), np.require(a, requirements="W")
    done = _run(a[:0], a[:0], a, ks, beta=zero, bits=bits, chunk=chunk, subtract=False)
    return done.selection


def _run(
    theta: Floats,
    params: Floats,
    a: Floats,
    ks: Ints,
    *,
    beta: np.float32,
    bits: int,
    chunk: int,
    subtract: bool,
) -> Feedback:
    most = int(np.minimum(ks, chunk).sum())
    counts, levels = np.empty(len(ks), np.int64), np.empty((len(ks), bits), np.uint16)
    positions = np.empty(most, np.uint16)
    negative, high = np.empty(most, np.bool_), np.empty(most, np.bool_)
    originals = np.empty(most if subtract else 0, np.float32)
    num, norm_sq, bad = 0, 0.0, -1
    if len(ks):
        num, norm_sq, bad = run_block(
            theta, params, a, beta, subtract, ks, chunk,
            counts, positions, negative, high, originals, levels,
        )  # fmt: skip
    return Feedback(
        selection=Selection(
            num_elements=len(a),
            chunk=chunk,
            counts=counts,
            positions=positions[:num],
            negative=negative[:num],
            high=high[:num],
            levels=levels,
        ),
        originals=originals[:num],
        norm_sq=norm_sq,
        bad=bad if bad < 0 else bad * chunk + reference.first_non_finite(a[bad * chunk :]),
    )


def write_sections(selection: Selection) -> tuple[int, dict[str, bytes]]:
    ends = np.zeros(len(SECTIONS), np.int64)
    k, body = write_body(
        selection.num_elements,
        selection.chunk,
        selection.counts,
        selection.positions,
        selection.negative,
        selection.high,
        selection.levels,
        ends,
    )
    whole, stops = body.tobytes(), ends.tolist()
    absent = {"counts"} if k else set()
    if selection.bits == 1:
        absent |= {"spread", "highs"}
    cuts = zip(SECTIONS, [0, *stops], stops, strict=False)
    return k, {name: whole[start:stop] for name, start, stop in cuts if name not in absent}


def unpack(unary: Bytes, fields: Bytes, counts: Ints, rice: Ints) -> Ints:
    values = np.empty(int(counts.sum()), np.int64)
    unpack_runs(_as_words(unary), _as_words(fields), counts, rice, values)
    return values


def _as_words(data: Bytes) -> Words:
    padded = np.zeros(len(data) // 8 + 1, "<u8")
    padded.view(np.uint8)[: len(data)] = data
    return padded.astype(np.uint64, copy=False)


def place(gaps: Ints, counts: Ints, lengths: Ints) -> Codes | None:
    positions = np.empty(len(gaps), np.uint16)
    return positions if place_chunks(gaps, counts, lengths, positions) else None


def add(acc: Floats, weight_acc: Floats | None, weight: np.float32, selection: Selection) -> None:
    levels = level_values(selection.levels)
    weighted = weight_acc is not None
    add_chunks(
        acc, acc if weight_acc is None else weight_acc, weighted, weight, selection.counts,
        selection.chunk, selection.positions, selection.negative, selection.high, levels,
    )  # fmt: skip
