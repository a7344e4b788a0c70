"""Rice parameters against exhaustive search; gap codes against the bound.

Run alone: python -m pytest tests/loco/codec/test_rice.py
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loco.codec.rice import MAX_RICE, best_rice, differences, gap_rice, unzigzag, zigzag


@settings(deadline=None, max_examples=500)
@given(
    st.lists(st.integers(0, 3), max_size=50)
    | st.lists(st.integers(0, 70_000), max_size=50)
    | st.lists(st.sampled_from([0, 0, 0, 0, 1 << 22]), max_size=50)
)
def test_best_rice_is_the_lowest_of_the_cheapest_parameters(values: list[int]) -> None:
    def cost(r: int) -> int:
        return sum((v >> r) + 1 + r for v in values)

    expected = min(range(MAX_RICE + 1), key=cost)
    assert best_rice(np.array(values, np.int64)) == expected


@pytest.mark.parametrize("length", [1, 64, 1000, 4096, 32768])
def test_gap_rice_is_within_two_percent_of_the_best_parameter_for_random_positions(
    length: int,
) -> None:
    counts = np.arange(1, length + 1)
    rice = gap_rice(counts, np.full(length, length))
    p = counts / length

    def bits(r: np.ndarray) -> np.ndarray:
        stays = np.minimum((1 - p) ** (2.0**r), 1 - 1e-12)
        return r + 1 / (1 - stays)

    best = np.min([bits(np.full(length, r)) for r in range(16)], axis=0)
    assert (bits(rice) <= 1.02 * best).all()


def test_gap_rice_of_a_chunk_that_sends_nothing_is_zero() -> None:
    assert gap_rice(np.array([0, 1]), np.array([4096, 4096])).tolist() == [0, 11]


@pytest.mark.parametrize(("k", "excess"), [(32, 0.25), (64, 0.2), (128, 0.18), (1024, 0.08)])
def test_gaps_stay_near_the_bound_at_every_density(k: int, excess: float) -> None:
    rng = np.random.default_rng(k)
    bound = (math.lgamma(4097) - math.lgamma(k + 1) - math.lgamma(4097 - k)) / math.log(2) / k
    positions = np.sort(rng.permuted(np.tile(np.arange(4096), (200, 1)), axis=1)[:, :k], axis=1)
    gaps = np.diff(positions, prepend=-1, axis=1) - 1
    r = int(gap_rice(np.array([k]), np.array([4096]))[0])
    assert bound <= ((gaps >> r) + 1 + r).mean() <= bound + excess


@given(st.lists(st.integers(-(2**40), 2**40), max_size=30), st.integers(-5, 5))
def test_zigzag_and_differences_invert(values: list[int], first: int) -> None:
    array = np.array(values, np.int64)
    codes = zigzag(differences(array, first))
    assert (codes >= 0).all()
    assert np.array_equal(np.cumsum(unzigzag(codes)) + first, array)
