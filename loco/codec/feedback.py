"""The worker's hot path: error feedback and encoding in one pass, EF updated in place.

    a = beta * e + (theta - params);  v = Q(TopK(a));  e = a - v      (arXiv 2508.15706, section 3)

EF counts as committed only once the coordinator accepted v; `undo` turns it back into a.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from loco.codec.header import DENSE_BITS
from loco.codec.payload import (
    Encoded,
    as_flat,
    blocks,
    check_bits,
    check_finite,
    chunk_ks,
    encode_dense,
    join,
    select,
    to_bytes,
)
from loco.codec.selection import Floats

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class FeedbackEncoded(Encoded):
    """An encoded contribution that can be taken back."""

    originals: Floats
    """a at the sent indices.  # [num_values] fp32"""
    norm_sq: float
    """Sum of squares of the EF that remains."""

    def undo(self, ef: Tensor | Floats) -> None:
        """Turn `ef` = a - v back into a, bit for bit, because v was refused."""
        writable(ef)[self.indices] = self.originals


def encode_feedback(
    theta: Tensor | Floats,
    params: Tensor | Floats,
    ef: Tensor | Floats,
    *,
    beta: float = 0.95,
    k: int | npt.ArrayLike = 64,
    bits: int = 2,
    chunk: int = 4096,
) -> FeedbackEncoded:
    """Encode a = beta * ef + (theta - params) and leave a - v in `ef`.

    Args:
        theta, params, ef: fp32, one length, flat order; `ef` contiguous, it is written.
        beta: decay of the error feedback, rounded to fp32; then every operation rounds to fp32.
        k, bits, chunk: as `encode`; bits = 32 sends a itself, so that `ef` becomes zero.

    Raises:
        NonFiniteError: names the first element of a that is NaN or infinite; `ef` is unchanged.
        ValueError: as `encode`; or lengths differ, or `ef` is not contiguous.
    """
    old, new, e = as_flat(theta), as_flat(params), writable(ef)
    if not len(old) == len(new) == len(e):
        raise ValueError(f"lengths {len(old)}, {len(new)}, {len(e)} of theta, params, ef differ")
    ks = chunk_ks(k, len(e), chunk)
    decay = np.float32(beta)
    for start, stop, _, _ in blocks(len(e), chunk):
        cut = slice(start, stop)
        check_finite(decay * e[cut] + (old[cut] - new[cut]), start)
    if bits == DENSE_BITS:
        whole = encode_dense(decay * e + (old - new))
        assert whole.raw is not None
        e[:] = 0
        return FeedbackEncoded(
            num_elements=len(e),
            selection=None,
            raw=whole.raw,
            payload=whole.payload,
            originals=whole.raw,
            norm_sq=0.0,
        )
    check_bits(bits)
    parts, originals, norm_sq = [], [np.zeros(0, np.float32)], 0.0
    for start, stop, first, last in blocks(len(e), chunk):
        block = e[start:stop]
        np.add(decay * block, old[start:stop] - new[start:stop], out=block)
        part = select(block, ks[first:last], bits=bits, chunk=chunk, offset=start)
        sent = part.indices()
        originals.append(block[sent])
        block[sent] -= part.values()
        norm_sq += float(np.dot(block, block))
        parts.append(part)
    selection = join(parts, num_elements=len(e), bits=bits, chunk=chunk)
    return FeedbackEncoded(
        num_elements=len(e),
        selection=selection,
        payload=to_bytes(selection),
        originals=np.concatenate(originals),
        norm_sq=norm_sq,
    )


def writable(ef: Tensor | Floats) -> Floats:
    """A flat view of `ef` itself: what is written there is written to it."""
    array = ef if isinstance(ef, np.ndarray) else ef.detach().numpy()
    if array.dtype != np.float32 or not array.flags.c_contiguous or not array.flags.writeable:
        raise ValueError("ef: must be contiguous, writable float32, because it is updated in place")
    return array.reshape(-1)
