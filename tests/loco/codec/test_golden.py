"""The wire format, byte by byte: annotated hex in tests/golden/codec against encoder and decoder.

    pytest tests/loco/codec/test_golden.py --regenerate-golden    # then read the difference

A difference means another wire format: a new version byte, unless docs/protocol.md allows it.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import stranger
from support.explain import explain, parse

from loco import codec

pytestmark = pytest.mark.usefixtures("active_operations")
GOLDEN = Path(__file__).parents[2] / "golden" / "codec"


def ramp(length: int) -> np.ndarray:
    """1, -2, 3, ...: no two magnitudes are equal, the last are the largest."""
    sign = np.where(np.arange(length) % 2, -1, 1)
    return (sign * np.arange(1, length + 1)).astype(np.float32)


def example() -> np.ndarray:
    """The example of docs/protocol.md: the ramp, and two chunks whose last value stands out."""
    a = ramp(40)
    a[[15, 39]] *= 4
    return a


def two_scales() -> np.ndarray:
    """Three chunks of 16: one sends nothing, one has a far larger scale, the last is short."""
    a = ramp(40)
    a[:16] = 0
    a[16:32] *= 1024
    return a


CASES: dict[str, Callable[[], codec.Encoded]] = {
    "two_bits": lambda: codec.encode(example(), k=4, chunk=16),
    "one_bit": lambda: codec.encode(ramp(40), k=4, bits=1, chunk=16),
    "counts": lambda: codec.encode(two_scales(), k=[4, 2, 8], chunk=16),
    "near_the_start": lambda: codec.encode(np.where(np.arange(4096) < 40, 1, 0).astype(np.float32)),
    "edges": lambda: codec.encode(
        np.array([-0.0, 1e-45, -3.4028235e38, 0.0, -1e-45], np.float32), k=3, chunk=5
    ),
    "nothing": lambda: codec.encode(np.zeros(100, np.float32), k=4, chunk=16),
    "empty": lambda: codec.encode(np.zeros(0, np.float32)),
    "dense": lambda: codec.encode_dense(np.array([1.5, -0.0, 1e-45], np.float32)),
}


@pytest.mark.parametrize("name", CASES)
def test_golden_bytes(name: str, regenerate_golden: bool) -> None:
    encoded = CASES[name]()
    path = GOLDEN / f"{name}.txt"
    text = explain(encoded.payload)
    if regenerate_golden:
        path.write_text(text)
    assert text == path.read_text()
    golden = parse(path.read_text())
    decoded = codec.decode(golden, encoded.num_elements)
    assert golden == encoded.payload
    assert decoded.values.tobytes() == encoded.values.tobytes()
    assert list(stranger.decode(golden)) == decoded.indices.tolist()


def test_there_is_no_golden_file_without_a_case() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(CASES)
