"""`encode_feedback` against the three equations in plain NumPy; undo and atomicity as bits.

Run alone: python -m pytest tests/loco/codec/test_feedback.py
"""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from loco import codec
from loco.errors import NonFiniteError

pytestmark = pytest.mark.usefixtures("active_operations")


def three(num_elements: int) -> list[npt.NDArray[np.float32]]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(num_elements).astype(np.float32) for _ in range(3)]


@pytest.mark.parametrize("num_elements", [0, 1, 4096, 70_000, 600_000])
@pytest.mark.parametrize("bits", [1, 2])
def test_equals_feedback_then_encode_then_subtract(num_elements: int, bits: int) -> None:
    theta, params, ef = three(num_elements)
    a = np.float32(0.95) * ef + (theta - params)
    encoded = codec.encode_feedback(theta, params, ef, bits=bits)
    assert encoded.payload == codec.encode(a, bits=bits).payload
    assert ef.tobytes() == (a - encoded.dense().numpy()).tobytes()
    assert encoded.norm_sq == pytest.approx(float(np.sum(np.float64(ef) ** 2)), rel=1e-4)
    encoded.undo(ef)
    assert ef.tobytes() == a.tobytes()


def test_dense_sends_a_itself_and_empties_ef() -> None:
    theta, params, ef = three(5000)
    a = np.float32(0) * ef + (theta - params)
    encoded = codec.encode_feedback(theta, params, ef, beta=0.0, bits=32)
    assert encoded.payload == codec.encode_dense(a).payload
    assert not ef.any()
    encoded.undo(ef)
    assert ef.tobytes() == a.tobytes()


def test_tensors_are_updated_in_place() -> None:
    theta, params, ef = map(torch.from_numpy, three(4096 * 3))
    arrays = [x.numpy().copy() for x in (theta, params, ef)]
    encoded = codec.encode_feedback(theta.view(3, -1), params, ef.view(3, -1))
    assert encoded.payload == codec.encode_feedback(*arrays).payload
    assert ef.numpy().tobytes() == arrays[2].tobytes()


@pytest.mark.parametrize("bits", [2, 32])
def test_a_step_that_diverged_leaves_ef_unchanged(bits: int) -> None:
    theta, params, ef = three(600_000)
    params[599_990:] = np.nan
    before = ef.tobytes()
    with pytest.raises(NonFiniteError, match="element 599990 is NaN"):
        codec.encode_feedback(theta, params, ef, bits=bits)
    assert ef.tobytes() == before


@pytest.mark.parametrize("which", [0, 2])
def test_damaged_state_is_named_and_ef_holds_a_where_it_was_updated(which: int) -> None:
    theta, params, ef = buffers = three(600_000)
    buffers[which][400_000] = np.inf
    before = ef.copy()
    a = np.float32(0.95) * ef + (theta - params)
    with pytest.raises(NonFiniteError, match="element 400000 is NaN or infinite"):
        codec.encode_feedback(theta, params, ef)
    updated = ef.view(np.uint32) == a.view(np.uint32)
    assert updated[:390_000].all()
    assert (updated | (ef.view(np.uint32) == before.view(np.uint32))).all()


def test_overflow_of_finite_inputs_is_not_finite() -> None:
    ef = np.zeros(10, np.float32)
    with (
        np.errstate(over="ignore"),
        pytest.raises(NonFiniteError, match="element 3 is NaN or infinite"),
    ):
        codec.encode_feedback(
            *(np.where(np.arange(10) == 3, x, 0).astype(np.float32) for x in (3e38, -3e38)), ef
        )


def test_buffers_that_do_not_fit_are_refused() -> None:
    theta, params, ef = three(100)
    with pytest.raises(ValueError, match="100, 99, 100"):
        codec.encode_feedback(theta, params[1:], ef)
    with pytest.raises(ValueError, match="in place"):
        codec.encode_feedback(theta[::2], params[::2], ef[::2])
