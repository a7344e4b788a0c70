"""Digests: cut anywhere they are the same, changed anywhere they differ, known values stay.

Compared with: xxhash and hashlib applied chunk by chunk. Run alone:
pytest tests/loco/test_digest.py
"""

from __future__ import annotations

import hashlib

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from loco.digest import bytes_digest, chunk_hashes, theta_digest
from loco.layout import CHUNK

THETA = np.arange(5 * CHUNK, dtype=np.float32)


def test_chunks_are_hashed_one_by_one() -> None:
    expected = [
        xxhash.xxh3_64_intdigest(THETA[i * CHUNK : (i + 1) * CHUNK].tobytes()) for i in range(5)
    ]
    assert chunk_hashes(THETA).tolist() == expected
    packed = b"".join(value.to_bytes(8, "little") for value in expected)
    assert theta_digest(chunk_hashes(THETA)) == hashlib.sha256(packed).hexdigest()


def test_the_digest_of_a_known_theta_never_changes() -> None:
    """It is stored in journals and compared between versions."""
    assert theta_digest(chunk_hashes(THETA)) == (
        "230c86bdc3f8f81253c8b7d20491cbfec9b1e2ff9bcac0064f56cf760c287af5"
    )


@given(st.integers(0, 5))
def test_ranks_hash_their_own_rows(cut: int) -> None:
    parts = [chunk_hashes(THETA[: cut * CHUNK]), chunk_hashes(THETA[cut * CHUNK :])]
    assert theta_digest(np.concatenate(parts)) == theta_digest(chunk_hashes(THETA))


@given(st.integers(0, 5 * CHUNK - 1), st.integers(0, 31))
def test_any_flipped_bit_changes_it(element: int, bit: int) -> None:
    changed = THETA.copy()
    changed.view(np.uint32)[element] ^= np.uint32(1 << bit)
    assert theta_digest(chunk_hashes(changed)) != theta_digest(chunk_hashes(THETA))


def test_the_sign_of_zero_counts() -> None:
    zeros = np.zeros(CHUNK, np.float32)
    assert chunk_hashes(zeros) != chunk_hashes(-zeros)


def test_bytes_are_hashed_with_xxh3_128() -> None:
    assert bytes_digest(b"loco") == xxhash.xxh3_128(b"loco").digest()
    assert bytes_digest(memoryview(b"loco")) == bytes_digest(b"loco")
    assert len(bytes_digest(b"")) == 16
