"""Error feedback for tensors that live on a device: the Triton kernel, or a detour over the host.

Only reached with tensors that are not on the CPU, so torch is there. The bytes are the CPU's.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loco.codec import feedback as host
from loco.codec.header import DENSE_BITS
from loco.codec.payload import check_bits, chunk_ks, refuse_non_finite, to_bytes
from loco.codec.rice import Ints
from loco.codec.selection import Floats


def encode_feedback(
    theta: Tensor | Floats,
    params: Tensor | Floats,
    ef: Tensor,
    *,
    beta: float,
    k: int | npt.ArrayLike,
    bits: int,
    chunk: int,
) -> host.FeedbackEncoded:
    """`loco.codec.encode_feedback` for tensors on the device of `ef`.

    Raises:
        NonFiniteError, ValueError: as there; a bad chunk is left as it was.
    """
    flat = [_flat(x, name) for x, name in ((theta, "theta"), (params, "params"), (ef, "ef"))]
    places = {(len(x), x.device) for x in flat}
    if len(places) > 1:
        raise ValueError(f"theta, params and ef differ in length or device: {places}")
    kernels = _triton() if ef.device.type == "cuda" and bits != DENSE_BITS else None
    if kernels is None:
        return _over_the_host(*flat, beta=beta, k=k, bits=bits, chunk=chunk)
    return _with_triton(kernels, *flat, beta=np.float32(beta), k=k, bits=bits, chunk=chunk)


def put(ef: Tensor, indices: Ints, values: Floats) -> None:
    """ef[indices] = values, on the device."""
    at = torch.from_numpy(indices).to(ef.device)
    _flat(ef, "ef")[at] = torch.from_numpy(values).to(ef.device)


def _with_triton(
    kernels: ModuleType,
    theta: Tensor,
    params: Tensor,
    ef: Tensor,
    *,
    beta: np.float32,
    k: int | npt.ArrayLike,
    bits: int,
    chunk: int,
) -> host.FeedbackEncoded:
    ks = chunk_ks(k, len(ef), chunk)
    check_bits(bits)
    finite = torch.isfinite(params)
    if not finite.all():
        refuse_non_finite(int((~finite).int().argmax()))
    done = kernels.feedback(theta, params, ef, ks, beta=beta, bits=bits, chunk=chunk)
    if done.bad >= 0:
        put(ef, done.selection.indices(), done.originals)
        refuse_non_finite(done.bad)
    return host.FeedbackEncoded(
        num_elements=len(ef),
        selection=done.selection,
        payload=to_bytes(done.selection),
        originals=done.originals,
        norm_sq=done.norm_sq,
    )


def _over_the_host(
    theta: Tensor,
    params: Tensor,
    ef: Tensor,
    *,
    beta: float,
    k: int | npt.ArrayLike,
    bits: int,
    chunk: int,
) -> host.FeedbackEncoded:
    copy = ef.cpu()
    encoded = host.encode_feedback(
        theta.cpu(), params.cpu(), copy, beta=beta, k=k, bits=bits, chunk=chunk
    )
    ef.copy_(copy)
    return encoded


def _flat(x: Tensor | Floats, name: str) -> Tensor:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name}: must be a tensor on the device of ef, not {type(x)}")
    if x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(f"{name}: must be contiguous float32, not {x.dtype} {x.stride()}")
    return x.detach().view(-1)


def _triton() -> ModuleType | None:
    try:
        from loco.codec import triton_feedback
    except ImportError:
        return None
    return triton_feedback
