"""Some chunks only of what a payload describes: the fragment whose turn it is."""

from __future__ import annotations

import numpy as np

from loco.codec.feedback import FeedbackEncoded, encode_feedback
from loco.codec.payload import Encoded, encode, to_bytes
from loco.codec.rice import Ints
from loco.codec.selection import Bools, Floats, Selection


def encode_fragment(
    theta: Floats,
    params: Floats,
    ef: Floats,
    *,
    active: Bools,
    beta: float,
    k: int,
    bits: int,
    chunk: int = 4096,
) -> FeedbackEncoded:
    """`encode_feedback` on the active chunks; of the others nothing is sent and `ef` stays.

    Args:
        theta, params, ef: [C * chunk] fp32, whole chunks in host memory; `ef` is written.
        active: [C] the chunks that take part. With bits = 32 all of them must.
        beta, k, bits, chunk: as `encode_feedback`.

    Returns:
        A payload of all C * chunk elements.

    Raises:
        NonFiniteError: counts elements of the active chunks only; `ef` is as it was.
        ValueError: as `encode_feedback`.
    """
    if active.all():
        return encode_feedback(theta, params, ef, beta=beta, k=k, bits=bits, chunk=chunk)
    theta_CL, params_CL, ef_CL = (a.reshape(-1, chunk) for a in (theta, params, ef))
    part = ef_CL[active]
    encoded = encode_feedback(
        theta_CL[active], params_CL[active], part, beta=beta, k=k, bits=bits, chunk=chunk
    )
    ef_CL[active] = part
    assert encoded.selection is not None, "dense contributions have no fragments"
    selection = _spread(encoded.selection, active)
    return FeedbackEncoded(
        num_elements=len(ef),
        selection=selection,
        payload=to_bytes(selection),
        originals=encoded.originals,
        norm_sq=float(np.dot(ef, ef)),
    )


def encode_chunks(
    a: Floats, *, active: Bools, k: int | Ints, bits: int, chunk: int = 4096
) -> Encoded:
    """`encode` of the A active ones of C chunks, as a payload of all; the others send nothing.

    Args:
        a: [A, chunk] fp32, the active chunks in order.
        active: [C] which they are.
        k: one for all of them, or [A].
        bits, chunk: as `encode`.

    Raises:
        NonFiniteError: counts elements of the active chunks only.
        ValueError: as `encode`.
    """
    part = encode(a, k=k, bits=bits, chunk=chunk).selection
    assert part is not None
    selection = _spread(part, active)
    return Encoded(
        num_elements=selection.num_elements, selection=selection, payload=to_bytes(selection)
    )


def _spread(part: Selection, active: Bools) -> Selection:
    """The same values, in the places of their chunks among all."""
    counts = np.zeros(len(active), np.int64)
    levels = np.zeros((len(active), part.bits), np.uint16)
    counts[active], levels[active] = part.counts, part.levels
    return Selection(
        num_elements=len(active) * part.chunk,
        chunk=part.chunk,
        counts=counts,
        positions=part.positions,
        negative=part.negative,
        high=part.high,
        levels=levels,
    )
