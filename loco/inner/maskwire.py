"""Masks as bytes: k of n positions, in a size that both ends know before they talk.

Elias-Fano code (Elias, J. ACM 21(2), 1974; Fano, 1971): the low bits of each position as they are,
the high bits as gaps in unary. It takes at most 2 + log2(n / k) bits a position (5.3 at 10 %, 8.6
at 1 %; the entropy is 4.7 and 8.1), and its size depends on n and k alone: no lengths are exchanged
before the gather, and a GPU never waits for the host. From a density of about one third on, one bit
a position is shorter; at density one nothing is sent. Indices of 12 or 16 bits inside blocks are
longer than this code at every density above 1/1024, so there is no such mode.
"""

from __future__ import annotations

import torch
from torch import Tensor


def wire_bytes(n: int, k: int) -> int:
    """Length of the code of k out of n positions."""
    if k in (0, n):
        return 0
    return min(_num_bytes(n), _elias_fano_bytes(n, k))


def encode(positions: Tensor, n: int) -> Tensor:
    """Code ascending distinct positions [k] int64 in [0, n) as [wire_bytes(n, k)] uint8."""
    k = positions.numel()
    if k in (0, n):
        return positions.new_empty(0, dtype=torch.uint8)
    if _elias_fano_bytes(n, k) >= _num_bytes(n):
        return _pack(_marks(positions, n))
    num_low = _num_low_bits(n, k)
    shifts = torch.arange(num_low, device=positions.device)
    low = (positions[:, None] >> shifts) & 1  # [k, num_low]
    order = torch.arange(k, device=positions.device)
    high = _marks((positions >> num_low) + order, _num_high_bits(n, k))
    return torch.cat([_pack(high), _pack(low.bool().view(-1))])


def decode(code: Tensor, n: int, k: int) -> Tensor:
    """Positions [k] int64 of a code [wire_bytes(n, k)] uint8 made by `encode`."""
    if k in (0, n):
        return torch.arange(k, device=code.device)
    if _elias_fano_bytes(n, k) >= _num_bytes(n):
        return _where(_unpack(code, n), k)
    num_low, num_high = _num_low_bits(n, k), _num_high_bits(n, k)
    order = torch.arange(k, device=code.device)
    high = _where(_unpack(code[: _num_bytes(num_high)], num_high), k) - order
    low_bits = _unpack(code[_num_bytes(num_high) :], k * num_low).view(k, num_low)
    shifts = torch.arange(num_low, device=code.device)
    low = (low_bits.long() << shifts).sum(1)
    return (high << num_low) + low


def _num_low_bits(n: int, k: int) -> int:
    return max(0, (n // k).bit_length() - 1)


def _num_high_bits(n: int, k: int) -> int:
    return k + ((n - 1) >> _num_low_bits(n, k))


def _elias_fano_bytes(n: int, k: int) -> int:
    return _num_bytes(_num_high_bits(n, k)) + _num_bytes(k * _num_low_bits(n, k))


def _num_bytes(bits: int) -> int:
    return (bits + 7) // 8


def _marks(positions: Tensor, n: int) -> Tensor:
    marks = torch.zeros(n, dtype=torch.bool, device=positions.device)
    marks[positions] = True
    return marks


def _where(marks: Tensor, k: int) -> Tensor:
    # nonzero_static does not ask a GPU how many there are.
    return torch.nonzero_static(marks, size=k).view(-1)


def _pack(bits: Tensor) -> Tensor:
    """Bits [n] bool as bytes, least significant first."""
    padded = bits.new_zeros(_num_bytes(bits.numel()) * 8)
    padded[: bits.numel()] = bits
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (padded.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def _unpack(code: Tensor, n: int) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=code.device)
    return ((code[:, None] >> shifts) & 1).view(-1)[:n].bool()
