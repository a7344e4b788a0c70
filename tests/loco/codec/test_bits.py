"""Bits a value against their goals, errors against rivals, on synthetic input.

Real input and speed: python -m benchmarks.codec. Run alone: pytest tests/loco/codec/test_bits.py
"""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from benchmarks.codec_rivals import plain_encode, public_rule
from loco import codec

pytestmark = pytest.mark.usefixtures("active_operations")
GOALS = [(64, 2, 9.6), (64, 1, 8.8), (128, 2, 8.6), (32, 2, 10.7)]
NUM_CHUNKS = 256


def chunks(spread: float) -> npt.NDArray[np.float32]:
    """Gaussian chunks whose scales are log-normal with this spread."""
    rng = np.random.default_rng(0)
    scales = np.exp(spread * rng.standard_normal((NUM_CHUNKS, 1)))
    return (scales * rng.standard_normal((NUM_CHUNKS, 4096))).astype(np.float32).ravel()


def error(sent: npt.NDArray[np.float32], coded: npt.NDArray[np.float32]) -> float:
    """Squared error relative to the energy of what is sent."""
    wide = sent.astype(np.float64)
    return float(np.sum((wide - coded) ** 2) / np.sum(wide**2))


@pytest.mark.parametrize(("k", "bits", "goal"), GOALS)
@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_bits_a_value_with_everything_included(
    k: int, bits: int, goal: float, spread: float
) -> None:
    encoded = codec.encode(chunks(spread), k=k, bits=bits)
    assert 8 * len(encoded.payload) / encoded.num_values <= goal


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_two_levels_a_chunk_beat_one_grid_a_tensor(spread: float) -> None:
    a = chunks(spread)
    encoded = codec.encode(a)
    sent = a[encoded.indices]
    theirs = public_rule(sent.astype(np.float64), encoded.indices, [slice(0, len(a))])
    assert 2 * error(sent, encoded.values) < error(sent, theirs.astype(np.float32))


def test_an_all_zero_chunk_costs_two_bits() -> None:
    sizes = [len(codec.encode(np.zeros(4096 * n, np.float32)).payload) for n in (0, 8000)]
    assert 8 * (sizes[1] - sizes[0]) <= 2 * 8000


def test_the_plain_rival_does_the_same_work() -> None:
    a = torch.from_numpy(chunks(0.0))
    plain, ours = torch.zeros_like(a), torch.zeros_like(a)
    zero = torch.zeros_like(a)
    plain_encode(a, zero, plain, beta=0.95, k=64)
    codec.encode_feedback(a, zero, ours)
    assert torch.equal(plain == a, ours == a)
    assert float((plain - ours).norm() / a.norm()) < 0.01
