"""The order of samples: a permutation of any length in constant memory, from a key.

A Feistel network over the next power of four, walked along its cycle until the value falls inside
the range (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). The order is a pure
function of (seed, site, epoch), so a data cursor is one integer, and resuming at it repeats and
skips nothing.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6  # four make a pseudo-random permutation (Luby and Rackoff, 1988); the mixer is weaker
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio, as in splitmix64


def permute(
    positions: NDArray[np.int64], length: int, *, seed: int, site: str, epoch: int
) -> NDArray[np.int64]:
    """Where the permutation of 0..length-1 sends each of `positions` (any shape).

    `length` is at least 1; every position lies in 0..length-1. Expected work is below four passes.
    """
    assert length >= 1
    assert positions.size == 0 or (positions.min() >= 0 and positions.max() < length)
    half_bits = np.uint64(max(1, ((length - 1).bit_length() + 1) // 2))
    keys = _round_keys(seed, site, epoch)
    values = _feistel(positions.astype(np.uint64), half_bits, keys)
    while (outside := values >= length).any():
        values[outside] = _feistel(values[outside], half_bits, keys)
    return values.astype(np.int64)


def _round_keys(seed: int, site: str, epoch: int) -> NDArray[np.uint64]:
    digest = hashlib.blake2b(f"{seed}/{site}/{epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _feistel(
    values: NDArray[np.uint64], half_bits: np.uint64, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << half_bits) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values * MULTIPLIER  # wraps modulo 2^64
    values ^= values >> np.uint64(32)
    values *= MULTIPLIER
    return values ^ (values >> np.uint64(29))
