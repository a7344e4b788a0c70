"""Encode and decode against a NumPy oracle of canonical top-k, and each other.

Run alone: python -m pytest tests/loco/codec/test_payload.py
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from loco import codec
from loco.errors import NonFiniteError

pytestmark = pytest.mark.usefixtures("active_operations")

Floats = npt.NDArray[np.float32]
Encode = Callable[[Floats], codec.Encoded]

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = hnp.arrays(np.float32, st.integers(0, 300), elements=finite)
few_magnitudes = hnp.arrays(
    np.float32,
    st.integers(0, 300),
    elements=st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, -1e-45, 3e38]),
)


def top_k_oracle(a: Floats, k: int, chunk: int) -> npt.NDArray[np.int64]:
    """Largest magnitude, then lowest index; zeros never."""
    sent = []
    for start in range(0, len(a), chunk):
        mag = np.abs(a[start : start + chunk])
        order = np.lexsort((np.arange(len(mag)), -mag))[:k]
        sent += sorted(start + i for i in order if mag[i] > 0)
    return np.array(sent, np.int64)


@settings(deadline=None, max_examples=300)
@given(
    a=vectors | few_magnitudes,
    k=st.integers(1, 20),
    bits=st.sampled_from([1, 2]),
    chunk=st.sampled_from([20, 32, 33, 300]),
)
def test_sends_the_canonical_top_k_and_decodes_to_the_same(
    a: Floats, k: int, bits: int, chunk: int
) -> None:
    encoded = codec.encode(a, k=k, bits=bits, chunk=chunk)
    decoded = codec.decode(encoded.payload, len(a))
    sent = top_k_oracle(a, k, chunk)
    assert np.array_equal(encoded.indices, sent)
    assert np.array_equal(decoded.indices, sent)
    assert encoded.values.tobytes() == decoded.values.tobytes()
    assert np.array_equal(np.signbit(decoded.values), np.signbit(a[sent]))
    assert np.isfinite(decoded.values).all()
    assert (decoded.values != 0).all()
    assert codec.payload_length(encoded.payload + b"next") == len(encoded.payload)
    assert codec.peek(encoded.payload).num_values == encoded.num_values == len(sent)


def test_each_chunk_may_have_its_own_k() -> None:
    a = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    ks = np.array([5, 0, 100, 1, 40, 100, 7, 3, 2, 1])
    encoded = codec.encode(a, k=ks, chunk=100)
    assert np.array_equal(np.bincount(encoded.indices // 100), ks)
    assert np.array_equal(codec.decode(encoded.payload, 1000).indices, encoded.indices)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (4099,), (3, 0, 7), (3, 50, 7), (3, 2, 5, 7)])
def test_tensors_of_any_shape_equal_their_flat_array(shape: tuple[int, ...]) -> None:
    a = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    encoded = codec.encode(a, chunk=64, k=5)
    assert encoded.payload == codec.encode(a.numpy().ravel(), chunk=64, k=5).payload
    assert encoded.num_values == sum(min(5, a.numel() - at) for at in range(0, a.numel(), 64))
    dense = encoded.dense()
    assert dense.shape == (a.numel(),)
    if a.numel() == 1:
        assert dense.item() == pytest.approx(a.item(), rel=0.01)


def test_dense_payload_gives_every_element_back() -> None:
    a = np.array([1.5, -0.0, 1e-45, 0.0], np.float32)
    decoded = codec.decode(codec.encode_dense(a).payload, 4)
    assert decoded.values.tobytes() == a.tobytes()
    assert decoded.indices.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "encode", [partial(codec.encode, bits=1), codec.encode, codec.encode_dense]
)
def test_a_non_finite_element_is_named(bad: float, encode: Encode) -> None:
    a = np.ones(10000, np.float32)
    a[[7654, 9000]] = bad
    with pytest.raises(NonFiniteError, match="element 7654 is NaN"):
        encode(a)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 65, "chunk": 64}, "k from 65"),
        ({"k": -1}, "k from -1"),
        ({"k": 1.5}, "one integer"),
        ({"k": [1, 2, 3]}, "each chunk"),
        ({"bits": 3}, "bits 3"),
        ({"chunk": 0}, "chunk 0"),
        ({"chunk": 32769}, "chunk 32769"),
    ],
)
def test_impossible_settings_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        codec.encode(np.ones(10, np.float32), **arguments)


def test_only_fp32_is_taken() -> None:
    with pytest.raises(ValueError, match="float32"):
        codec.encode(np.ones(3))


@pytest.mark.parametrize("encode", [codec.encode, codec.encode_dense])
def test_decode_add_is_the_documented_fp32_arithmetic(encode: Encode) -> None:
    rng = np.random.default_rng(1)
    encoded = encode(rng.standard_normal(9000).astype(np.float32))
    acc = rng.standard_normal(9000).astype(np.float32)
    weights = np.zeros(9000, np.float32)
    expected = acc.copy()
    expected[encoded.indices] += np.float32(0.3) * encoded.values
    assert codec.decode_add(encoded.payload, acc, weight=0.3, weight_acc=weights) == (
        encoded.num_values
    )
    assert acc.tobytes() == expected.tobytes()
    assert np.array_equal(np.flatnonzero(weights), encoded.indices)
    assert set(weights[encoded.indices].tolist()) == {float(np.float32(0.3))}


def test_all_is_sorted_and_complete() -> None:
    assert sorted(codec.__all__, key=lambda n: (not n.isupper(), n[0].islower(), n)) == (
        codec.__all__
    )
    assert all(hasattr(codec, name) for name in codec.__all__)
