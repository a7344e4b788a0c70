"""The worker's hot path: error feedback and encoding in one pass, EF updated in place.

    a = beta * e + (theta - params);  v = Q(TopK(a));  e = a - v      (arXiv 2508.15706, section 3)

EF counts as committed only once the coordinator accepted v; `undo` turns it back into a.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import numpy as np
import numpy.typing as npt

from loco.codec.backend import operations
from loco.codec.header import DENSE_BITS
from loco.codec.payload import (
    Cut,
    Encoded,
    as_flat,
    check_bits,
    check_finite,
    check_threads,
    chunk_ks,
    cut_blocks,
    encode_dense,
    in_threads,
    refuse_non_finite,
    to_bytes,
    writable,
)
from loco.codec.rice import Ints
from loco.codec.selection import Feedback, Floats, concatenate

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class FeedbackEncoded(Encoded):
    """An encoded contribution that can be taken back."""

    originals: Floats
    """a at the sent indices.  # [num_values] fp32"""
    norm_sq: float
    """Sum of squares of the EF that remains; a metric, its last digits vary with the processor."""

    def undo(self, ef: Tensor | Floats) -> None:
        """Turn `ef` = a - v back into a, bit for bit, because v was refused."""
        if _on_device(ef):
            from loco.codec import device

            device.put(ef, self.indices, self.originals)
        else:
            writable(ef, "ef")[self.indices] = self.originals


@dataclass(frozen=True)
class Buffers:
    """The three flat fp32 buffers of one call; `ef` is written."""

    theta: Floats
    params: Floats
    ef: Floats

    def cut(self, cut: Cut) -> tuple[Floats, Floats, Floats]:
        """The part that belongs to `cut`."""
        return self.theta[cut.elements], self.params[cut.elements], self.ef[cut.elements]


def encode_feedback(
    theta: Tensor | Floats,
    params: Tensor | Floats,
    ef: Tensor | Floats,
    *,
    beta: float = 0.95,
    k: int | npt.ArrayLike = 64,
    bits: int = 2,
    chunk: int = 4096,
    num_threads: int = 1,
) -> FeedbackEncoded:
    """Encode a = beta * ef + (theta - params) and leave a - v in `ef`.

    Args:
        theta, params, ef: fp32, one length, flat order; `ef` contiguous, it is written. All on the
            CPU, or all on one device, where a Triton kernel does the work.
        beta: decay of the error feedback, rounded to fp32; then every operation rounds to fp32.
        k, bits, chunk, num_threads: as `encode`; bits = 32 sends a itself, `ef` becomes zero.

    Raises:
        NonFiniteError: names the first element that is NaN or infinite. `params` is checked before
            anything is written, so a step that diverged leaves `ef` unchanged. If theta or EF
            itself is damaged, or the sum overflows, `ef` holds a wherever it was updated, as after
            `undo`; checking these two as well would cost a fifth of the speed.
        ValueError: as `encode`; or lengths differ, or `ef` is not contiguous.
    """
    if _on_device(ef):
        from loco.codec import device

        return device.encode_feedback(theta, params, ef, beta=beta, k=k, bits=bits, chunk=chunk)
    buffers = Buffers(as_flat(theta), as_flat(params), writable(ef, "ef"))
    lengths = [len(buffers.theta), len(buffers.params), len(buffers.ef)]
    if len(set(lengths)) > 1:
        raise ValueError(f"lengths {lengths} of theta, params and ef differ")
    ks = chunk_ks(k, lengths[0], chunk)
    decay = np.float32(beta)
    if bits == DENSE_BITS:
        return _send_all(buffers, decay)
    check_bits(bits)
    check_threads(num_threads)
    return _send_top(buffers, ks, decay, bits, chunk, num_threads)


def _on_device(ef: Tensor | Floats) -> TypeGuard[Tensor]:
    return not isinstance(ef, np.ndarray) and ef.device.type != "cpu"


def _send_top(
    buffers: Buffers, ks: Ints, beta: np.float32, bits: int, chunk: int, num_threads: int
) -> FeedbackEncoded:
    cuts = cut_blocks(len(buffers.ef), chunk, num_threads)
    check_finite(
        cuts, num_threads, lambda cut: operations().first_non_finite(buffers.params[cut.elements])
    )

    def feedback(cut: Cut) -> Feedback:
        return operations().feedback(
            *buffers.cut(cut), ks[cut.chunks], beta=beta, bits=bits, chunk=chunk
        )

    parts = in_threads(feedback, cuts, num_threads)
    _check_parts(buffers, cuts, parts)
    selection = concatenate([part.selection for part in parts])
    return FeedbackEncoded(
        num_elements=len(buffers.ef),
        selection=selection,
        payload=to_bytes(selection),
        originals=parts[0].originals if len(parts) == 1 else _joined(parts),
        norm_sq=sum(part.norm_sq for part in parts),
    )


def _joined(parts: Sequence[Feedback]) -> Floats:
    return np.concatenate([part.originals for part in parts])


def _check_parts(buffers: Buffers, cuts: Sequence[Cut], parts: Sequence[Feedback]) -> None:
    """Name the first element that is not finite, with `ef` = a wherever it was updated."""
    bad = [
        cut.elements.start + part.bad
        for cut, part in zip(cuts, parts, strict=True)
        if part.bad >= 0
    ]
    if not bad:
        return
    for cut, part in zip(cuts, parts, strict=True):
        buffers.ef[cut.elements][part.selection.indices()] = part.originals
    refuse_non_finite(bad[0])


def _send_all(buffers: Buffers, beta: np.float32) -> FeedbackEncoded:
    with np.errstate(over="ignore", invalid="ignore"):
        sent = encode_dense(beta * buffers.ef + (buffers.theta - buffers.params))
    buffers.ef[:] = 0
    assert sent.raw is not None
    return FeedbackEncoded(
        num_elements=sent.num_elements,
        selection=None,
        raw=sent.raw,
        payload=sent.payload,
        originals=sent.raw,
        norm_sq=0.0,
    )
