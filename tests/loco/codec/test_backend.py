"""Which operations run, in how many threads: never a matter of bytes.

Run alone: python -m pytest tests/loco/codec/test_backend.py
"""

import hashlib
import subprocess
import sys

import numpy as np
import pytest

from loco import codec
from loco.codec import backend

both = pytest.mark.usefixtures("active_operations")


@both
@pytest.mark.parametrize("num_threads", [1, 2, 3, 16])
def test_threads_and_blocks_give_the_same_bytes(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    theta, params, ef = rng.standard_normal((3, 300_000)).astype(np.float32)
    whole, left = ef.copy(), ef.copy()
    expected = codec.encode_feedback(theta, params, whole)
    monkeypatch.setattr(backend.operations(), "BLOCK_ELEMENTS", 40_000)
    encoded = codec.encode_feedback(theta, params, left, num_threads=num_threads)
    assert encoded.payload == expected.payload
    assert left.tobytes() == whole.tobytes()
    assert codec.encode(theta, num_threads=num_threads).payload == codec.encode(theta).payload


@both
def test_read_only_and_unaligned_input_is_taken() -> None:
    a = np.random.default_rng(0).standard_normal(9000).astype(np.float32)
    expected = codec.encode(a).payload
    frozen = np.frombuffer(a.tobytes(), np.float32)
    odd = np.frombuffer(b"x" + a.tobytes(), np.float32, offset=1)
    assert codec.encode(frozen).payload == expected
    assert codec.encode(odd).payload == expected
    ef = np.zeros(9000, np.float32)
    zero = np.frombuffer(ef.tobytes(), np.float32)
    assert codec.encode_feedback(odd, zero, ef).payload == expected


def test_importing_the_codec_imports_neither_torch_nor_numba() -> None:
    code = "import sys, loco.codec; print([m for m in ('torch', 'numba') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert found.stdout.strip() == "[]"


def test_a_process_without_numba_writes_the_same_bytes() -> None:
    code = """
import sys
sys.modules["numba"] = None
import hashlib, numpy, loco.codec as codec
a = numpy.random.default_rng(5).standard_normal(20_000).astype(numpy.float32)
print(codec.warm_up(), hashlib.sha256(codec.encode(a).payload).hexdigest())
"""
    a = np.random.default_rng(5).standard_normal(20_000).astype(np.float32)
    digest = hashlib.sha256(codec.encode(a).payload).hexdigest()
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert found.stdout.split() == ["numpy", digest]
