"""Write the seed corpus of the codec's fuzz target: one small payload of each kind.

python tests/fuzz/make_corpus.py tests/fuzz/corpus/codec
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from loco import codec


def seeds() -> dict[str, bytes]:
    """Input by name; the first byte asks the target to put length and checksums right."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal(200).astype(np.float32)
    gap = a.copy()
    gap[:50] = 0
    payloads = {
        "uniform-2-bits": codec.encode(a, k=4, chunk=50),
        "uniform-1-bit": codec.encode(a, k=4, bits=1, chunk=50),
        "counts": codec.encode(gap, k=[0, 3, 20, 50], chunk=50),
        "every-element": codec.encode(a, k=50, chunk=50),
        "chunk-of-one": codec.encode(a[:20], k=1, chunk=1),
        "nothing": codec.encode(np.zeros(200, np.float32)),
        "empty": codec.encode(a[:0]),
        "dense": codec.encode_dense(a[:8]),
    }
    return {name: b"\x03" + encoded.payload for name, encoded in payloads.items()}


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in seeds().items():
        (folder / name).write_bytes(data)


if __name__ == "__main__":
    main()
