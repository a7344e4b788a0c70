"""The Triton kernel against the NumPy reference, bit by bit: interpreted, or on a GPU.

pip install triton      # 1 GB, so not among the test dependencies; torch for CUDA brings it
python -m pytest tests/loco/codec/test_triton.py
"""

import os

import numpy as np
import numpy.typing as npt
import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
pytest.importorskip("triton", reason="triton is not installed")

from loco import codec
from loco.codec import reference, triton_feedback

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Floats = npt.NDArray[np.float32]


def wild(kind: str, length: int) -> Floats:
    """EF of one kind: plain, many ties, a scale from 1e-45 to 1e15 an element, mostly zero."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal(length)
    if kind == "ties":
        a = np.round(a * 2) / 2
    elif kind == "scales":
        a = np.clip(a * np.exp(20 * rng.standard_normal(length)), -1e15, 1e15)
    elif kind == "zeros":
        a *= rng.random(length) < 0.01
    return a.astype(np.float32)


@pytest.mark.parametrize("kind", ["plain", "ties", "scales", "zeros"])
@pytest.mark.parametrize(
    ("length", "chunk"), [(0, 64), (1, 64), (700, 64), (1000, 100), (9000, 4096)]
)
@pytest.mark.parametrize("bits", [1, 2])
def test_equals_the_reference(kind: str, length: int, chunk: int, bits: int) -> None:
    ef = wild(kind, length)
    rng = np.random.default_rng(1)
    theta, params = rng.standard_normal((2, length)).astype(np.float32)
    ks = rng.integers(0, chunk // 3, -(-length // chunk))
    on_device = [torch.from_numpy(x.copy()).to(DEVICE) for x in (theta, params, ef)]
    beta = np.float32(0.95)
    theirs = reference.feedback(theta, params, ef, ks, beta=beta, bits=bits, chunk=chunk)
    ours = triton_feedback.feedback(*on_device, ks, beta=beta, bits=bits, chunk=chunk)
    for name in ("counts", "positions", "negative", "high", "levels"):
        left, right = getattr(ours.selection, name), getattr(theirs.selection, name)
        assert left.dtype == right.dtype
        assert np.array_equal(left, right), name
    assert ours.originals.tobytes() == theirs.originals.tobytes()
    assert on_device[2].cpu().numpy().tobytes() == ef.tobytes()
    assert ours.norm_sq == pytest.approx(theirs.norm_sq, rel=1e-3)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter is NumPy
def test_a_chunk_that_is_not_finite_is_named_and_left_alone() -> None:
    theta, params, ef = (torch.ones(300, device=DEVICE) for _ in range(3))
    theta[250] = torch.inf
    done = triton_feedback.feedback(
        theta, params, ef, np.full(3, 5), beta=np.float32(1), bits=2, chunk=100
    )
    assert done.bad == 250
    assert (ef[200:] == 1).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_writes_the_bytes_of_the_cpu() -> None:
    theta, params, ef = torch.randn(3, 1_000_000, generator=torch.Generator().manual_seed(0))
    on_gpu = [x.cuda() for x in (theta, params, ef)]
    expected = codec.encode_feedback(theta, params, ef)
    encoded = codec.encode_feedback(*on_gpu)
    assert encoded.payload == expected.payload
    assert torch.equal(on_gpu[2].cpu(), ef)
    encoded.undo(on_gpu[2])
    expected.undo(ef)
    assert torch.equal(on_gpu[2].cpu(), ef)
