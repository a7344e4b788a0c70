"""Digests of theta and of transfers (XXH3: detects accidents; it does not authenticate).

Theta is hashed chunk by chunk, so that ranks hash their own rows in parallel and a mismatch can be
traced to a parameter; the digest of theta is SHA-256 over the chunk hashes in order.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from loco.layout import CHUNK


def chunk_hashes(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.uint64]:
    """XXH3-64 of each row of `rows` [num_chunks * 4096] fp32 -> [num_chunks] uint64."""
    view = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
    size = 4 * CHUNK
    return np.fromiter(
        (xxhash.xxh3_64_intdigest(view[i : i + size]) for i in range(0, len(view), size)),
        dtype=np.uint64,
        count=rows.size // CHUNK,
    )


def theta_digest(hashes: npt.NDArray[np.uint64]) -> str:
    """Digest of theta from its chunk hashes [num_chunks] uint64, hex."""
    return hashlib.sha256(hashes.astype("<u8").tobytes()).hexdigest()


def bytes_digest(data: bytes | memoryview) -> bytes:
    """XXH3-128 of the bytes of a transfer, 16 bytes, big-endian."""
    return xxhash.xxh3_128_digest(data)


def file_digest(path: Path) -> bytes:
    """XXH3-128 of a file's bytes, read piece by piece."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.digest()
