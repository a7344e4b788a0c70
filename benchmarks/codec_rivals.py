"""What the codec is compared with: the public code's quantizer, and a plain encoder in torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loco.layout import CHUNK

Doubles = npt.NDArray[np.float64]


def public_rule(
    values: Doubles, indices: npt.NDArray[np.int64], tensors: list[slice]
) -> Doubles:  # [N], [N] -> [N]
    """The quantizer of the public SparseLoCo code: four uniform bins over 6 sigma of a tensor.

    Each bin is replaced by the mean of what fell into it. Its wire has 12 bits for an index and a
    byte for a code.
    """
    quantized = np.zeros_like(values)
    for tensor in tensors:
        mine = (indices >= tensor.start) & (indices < tensor.stop)
        v = values[mine]
        if len(v) < 2:
            quantized[mine] = v
            continue
        shift = v.mean()
        centered = v - shift
        scale = max(6 * np.linalg.norm(centered) / np.sqrt(len(v) - 1) / 4, 1e-30)
        codes = np.clip(np.round(centered / scale) + 2, 0, 3).astype(int)
        sums = np.bincount(codes, weights=centered, minlength=4)
        means = sums / np.maximum(np.bincount(codes, minlength=4), 1)
        quantized[mine] = means[codes] + shift
    return quantized


def plain_encode(
    theta: Tensor, params: Tensor, ef: Tensor, *, beta: float, k: int
) -> bytes:  # flat fp32 of whole chunks
    """The same step as one would write it first: torch.topk, sort, two levels, 12-bit indices.

    `ef` is updated in place.
    """
    a = ef.mul_(beta).add_(theta - params).view(-1, CHUNK)
    positions = a.abs().topk(k, dim=1, sorted=False).indices.sort(dim=1).values
    values = a.gather(1, positions)
    magnitudes = values.abs()
    high = magnitudes > 2 * magnitudes.mean(1, keepdim=True) - magnitudes.amin(1, keepdim=True)
    low_level = _mean(magnitudes, ~high)
    high_level = _mean(magnitudes, high)
    sent = torch.where(high, high_level, low_level).copysign(values)
    a.scatter_(1, positions, values - sent)
    codes = (high.to(torch.uint8) * 2 + (values < 0)).view(-1, 4)
    packed_codes = codes[:, 0] | codes[:, 1] << 2 | codes[:, 2] << 4 | codes[:, 3] << 6
    pairs = positions.view(-1, 2)
    packed = pairs[:, 0] | pairs[:, 1] << 12
    packed_indices = torch.stack([packed & 255, packed >> 8 & 255, packed >> 16], dim=1)
    levels = torch.cat([low_level, high_level], dim=1)
    parts = levels, packed_codes, packed_indices.to(torch.uint8)
    return b"".join(part.numpy().tobytes() for part in parts)


def _mean(magnitudes: Tensor, which: Tensor) -> Tensor:
    return (magnitudes * which).sum(1, keepdim=True) / which.sum(1, keepdim=True).clamp(min=1)
