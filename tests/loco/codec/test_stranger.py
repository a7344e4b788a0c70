"""Payloads read by a decoder written from docs/protocol.md alone (tests/support/stranger.py).

Run alone: python -m pytest tests/loco/codec/test_stranger.py
"""

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support import stranger

from loco import codec

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def assert_same(encoded: codec.Encoded) -> None:
    read = stranger.decode(encoded.payload)
    assert list(read) == encoded.indices.tolist()
    assert list(read.values()) == encoded.values.tolist()


@settings(deadline=None, max_examples=100)
@given(
    a=hnp.arrays(np.float32, st.integers(0, 200), elements=st.just(0.0) | finite),
    k=st.integers(0, 16),
    bits=st.sampled_from([1, 2]),
    chunk=st.sampled_from([16, 33, 200]),
)
def test_sparse(a: npt.NDArray[np.float32], k: int, bits: int, chunk: int) -> None:
    assert_same(codec.encode(a, k=k, bits=bits, chunk=chunk))


def test_full_size() -> None:
    rng = np.random.default_rng(0)
    a = (
        rng.standard_normal(4096 * 5 + 100)
        * np.repeat([1, 0, 1e-3, 5, 1e9, 2], 4096)[: 4096 * 5 + 100]
    )
    a[4096 * 2 + 128 : 4096 * 3] = 0  # a short parameter in a padded chunk
    assert_same(codec.encode(a.astype(np.float32)))
    assert_same(codec.encode(a.astype(np.float32), k=[1000, 64, 200, 1, 0, 50]))


def test_dense() -> None:
    assert_same(codec.encode_dense(np.array([1.0, -2.5, 0.0], np.float32)))
