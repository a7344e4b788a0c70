"""Fuzz the decoder with atheris: any bytes give sound values or a listed reason, twice the same.

    pip install atheris==3.0.0
    python tests/fuzz/fuzz_codec.py tests/fuzz/corpus/codec -max_len=1024 -runs=10000000

The first byte of an input says how much is put right before decoding, so that the fuzzer reaches
the sections behind the checksums: bit 0, the checksums; bit 1, the length. NumPy and Numba must
agree on the reason or on every value. What a long run found: docs/lab-log.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["loco.codec"]):
    import numpy as np

    from loco import codec
    from loco.codec import backend, reference
    from loco.errors import PayloadError

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.payloads import HEADER, reseal, with_fields

backend.warm_up()
COMPILED = backend.operations()
MAX_ELEMENTS = 1 << 20  # a dense payload may hold so many; a larger claim is refused anyway

Answer = str | tuple[bytes, bytes]


def answer(operations: backend.Operations, payload: bytes, num_elements: int) -> Answer:
    """The reason for a refusal, or the bytes of what was read."""
    backend._active = operations
    try:
        decoded = codec.decode(payload, num_elements)
    except PayloadError as error:
        return codec.REASONS[codec.REASONS.index(error.reason)]
    assert len(decoded.indices) == len(decoded.values) == decoded.num_values
    if decoded.num_values:
        assert decoded.indices[0] >= 0
        assert decoded.indices[-1] < num_elements
        assert (np.diff(decoded.indices) > 0).all()
        assert np.isfinite(decoded.values).all()
    return decoded.indices.tobytes(), decoded.values.tobytes()


def fuzz(data: bytes) -> None:
    """One input."""
    if not data:
        return
    mode, payload = data[0], data[1:]
    if len(payload) >= HEADER:
        if mode & 2:
            payload = with_fields(payload, length=len(payload))
        if mode & 1:
            payload = reseal(payload)
    claimed = int.from_bytes(payload[8:16], "little")
    num_elements = claimed if claimed <= MAX_ELEMENTS or len(payload) < HEADER else MAX_ELEMENTS
    assert answer(reference, payload, num_elements) == answer(COMPILED, payload, num_elements)


if __name__ == "__main__":
    atheris.Setup(sys.argv, fuzz)
    atheris.Fuzz()
