"""The compiled operations against the NumPy reference, bit by bit.

Run alone: python -m pytest tests/loco/codec/test_kernels.py
"""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from loco.codec import kernels, reference
from loco.codec.selection import Selection

Floats = npt.NDArray[np.float32]

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
coarse = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.5, 2.0, 1e-45, -1e-45, 1e-40, 3.4e38, -3.4e38])


@st.composite
def selections(draw: st.DrawFn) -> tuple[Floats, npt.NDArray[np.int64], int]:
    """An array (wild, coarse with many ties, or normal with a scale a chunk), ks, chunk."""
    chunk = draw(st.sampled_from([1, 7, 63, 64, 65, 256, 300]))
    length = draw(st.integers(0, 700))
    kind = draw(st.sampled_from([finite, coarse, None]))
    if kind is None:
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        scales = np.exp(rng.standard_normal(-(-length // chunk)) * draw(st.sampled_from([0, 1, 9])))
        a = rng.standard_normal(length) * np.repeat(scales, chunk)[:length]
    else:
        a = draw(hnp.arrays(np.float32, length, elements=kind))
    ks = draw(hnp.arrays(np.int64, -(-length // chunk), elements=st.integers(0, chunk)))
    return a.astype(np.float32), ks, chunk


def assert_same(left: Selection, right: Selection) -> None:
    for name in ("counts", "positions", "negative", "high", "levels"):
        assert np.array_equal(getattr(left, name), getattr(right, name)), name


@settings(deadline=None, max_examples=300)
@given(case=selections(), bits=st.sampled_from([1, 2]), beta=st.sampled_from([0.0, 0.95, 1.0]))
def test_operations_equal_the_reference(
    case: tuple[Floats, npt.NDArray[np.int64], int], bits: int, beta: float
) -> None:
    a, ks, chunk = case
    assert_same(
        kernels.select(a, ks, bits=bits, chunk=chunk),
        reference.select(a, ks, bits=bits, chunk=chunk),
    )
    rng = np.random.default_rng(0)
    theta, params = rng.standard_normal((2, len(a))).astype(np.float32)
    left, right = a.copy(), a.copy()
    decay = np.float32(beta)
    ours = kernels.feedback(theta, params, left, ks, beta=decay, bits=bits, chunk=chunk)
    theirs = reference.feedback(theta, params, right, ks, beta=decay, bits=bits, chunk=chunk)
    assert_same(ours.selection, theirs.selection)
    assert ours.originals.tobytes() == theirs.originals.tobytes()
    assert left.tobytes() == right.tobytes()


@settings(deadline=None, max_examples=200)
@given(case=selections(), bits=st.sampled_from([1, 2]))
def test_sections_equal_the_reference(
    case: tuple[Floats, npt.NDArray[np.int64], int], bits: int
) -> None:
    a, ks, chunk = case
    selection = reference.select(a, ks, bits=bits, chunk=chunk)
    assert kernels.write_sections(selection) == reference.write_sections(selection)


@settings(deadline=None, max_examples=100)
@given(
    runs=st.lists(
        st.tuples(st.integers(0, 24), st.lists(st.integers(0, 5000), max_size=40)), max_size=6
    )
)
def test_rice_codes_come_back(runs: list[tuple[int, list[int]]]) -> None:
    values = np.array([v for _, run in runs for v in run], np.int64)
    counts = np.array([len(run) for _, run in runs], np.int64)
    rice = np.array([r for r, _ in runs], np.int64)
    packed = reference.pack(values, counts, rice)
    unary, fields = (np.frombuffer(part, np.uint8) for part in packed)
    assert np.array_equal(kernels.unpack(unary, fields, counts, rice), values)
    assert np.array_equal(reference.unpack(unary, fields, counts, rice), values)


@pytest.mark.parametrize("k", [1, 64, 300, 1024, 4096])
@pytest.mark.parametrize("ties", [False, True])
def test_large_chunks_equal_the_reference(k: int, ties: bool) -> None:
    rng = np.random.default_rng(k)
    a = rng.standard_normal(4096 * 40 + 77).astype(np.float32)
    a[:4096] = 0
    a[4096:8192] = np.where(rng.random(4096) < 0.01, a[4096:8192], 0)
    a[8192:40960] *= np.repeat(np.float32(10) ** rng.integers(-30, 30, 8), 4096).astype(np.float32)
    if ties:
        a = np.round(a * 4) / 4
    ks = np.full(41, k)
    ours = kernels.select(a, ks, bits=2, chunk=4096)
    assert_same(ours, reference.select(a, ks, bits=2, chunk=4096))
    assert kernels.write_sections(ours) == reference.write_sections(ours)
