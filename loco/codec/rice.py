"""Rice codes, the one entropy code of the format, as two bit strings that NumPy can read.

A non-negative integer v with parameter r is `v >> r` in unary (that many zeros, then a one) and the
low r bits in binary. All unary parts of a stream form one bit string, all binary parts another;
both fill bytes from the lowest bit. Where v is the gap between set bits of density p, this is
within 0.1 bit a set bit of the bound h(p) / p, r = 0 being the plain bitmap (Golomb 1966).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

MAX_RICE = 24  # a field of r bits then lies in 4 bytes, wherever it starts


def gap_rice(counts: Ints, lengths: Ints) -> Ints:
    """Best parameter for the gaps of `counts` random positions among `lengths`, per chunk.

    Doubling 2^r pays while (1 - p)^(2^r) > 0.618, the golden ratio's inverse. With 64 / 133 for its
    logarithm 0.4812 and 2p / (2 - p) for -log(1 - p), the smallest r that ends it is the bit length
    of (64 * (2 * length - count) - 1) // (266 * count); 0 where the count is 0.
    """
    quotients = (64 * (2 * lengths - counts) - 1) // np.maximum(266 * counts, 1)
    return np.where(counts > 0, np.frexp(quotients)[1], 0).astype(np.int64)


def best_rice(values: Ints) -> int:
    """The parameter that codes `values` in the fewest bits; the lowest of equals.

    It lies within two of log2(mean): from r to r + 1 each value gains one bit and the unary parts
    lose about mean / 2^(r + 1).
    """
    if len(values) == 0:
        return 0
    middle = (int(values.sum()) // len(values)).bit_length()
    candidates = np.arange(max(0, middle - 3), min(MAX_RICE, middle + 1) + 1)
    costs = (values >> candidates[:, None]).sum(axis=1) + candidates * len(values)
    return int(candidates[np.argmin(costs)])


def differences(values: Ints, first: int) -> Ints:
    """Each value less the one before it; less `first` at the start."""
    deltas = values.copy()
    deltas[1:] -= values[:-1]
    deltas[:1] -= first
    return deltas


def zigzag(deltas: Ints) -> Ints:
    """0, -1, 1, -2, ... as 0, 1, 2, 3, ..."""
    return (deltas << 1) ^ (deltas >> 63)


def unzigzag(codes: Ints) -> Ints:
    """Inverse of `zigzag`."""
    return (codes >> 1) ^ -(codes & 1)


def as_ints(values: npt.NDArray[Any]) -> Ints:
    """`values` as int64, without a copy where they are."""
    return values.astype(np.int64, copy=False)
