"""The order of samples is a permutation, differs by key, and never changes between versions.

Run alone: pytest tests/loco/data/test_order.py
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from loco.data import permute

LENGTHS = st.integers(1, 5000)
SEEDS = st.integers(0, 2**31 - 1)
GOLDEN = [88, 967, 569, 522, 426, 15, 428, 549]


@given(length=LENGTHS, seed=SEEDS, epoch=st.integers(0, 10**6), site=st.text(max_size=8))
@settings(deadline=None)
def test_it_is_a_permutation(length: int, seed: int, epoch: int, site: str) -> None:
    order = permute(np.arange(length), length, seed=seed, site=site, epoch=epoch)
    assert np.array_equal(np.sort(order), np.arange(length))


@given(length=st.integers(1, 2**40), seed=SEEDS, data=st.data())
@settings(deadline=None)
def test_a_position_does_not_depend_on_the_others(
    length: int, seed: int, data: st.DataObject
) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=20)))
    together = permute(positions, length, seed=seed, site="paris", epoch=0)
    alone = [
        permute(positions[i : i + 1], length, seed=seed, site="paris", epoch=0)[0]
        for i in range(len(positions))
    ]
    assert together.tolist() == alone
    assert together.max() < length


def test_seed_site_and_epoch_each_change_the_order() -> None:
    def order(seed: int, site: str, epoch: int) -> list[int]:
        return permute(np.arange(1000), 1000, seed=seed, site=site, epoch=epoch).tolist()

    orders = [order(0, "paris", 0), order(1, "paris", 0), order(0, "oslo", 0), order(0, "paris", 1)]
    for index, one in enumerate(orders):
        for other in orders[:index]:
            assert sum(a == b for a, b in zip(one, other, strict=True)) < 12  # 1 expected


def test_it_mixes_well() -> None:
    """Neighbours land far apart, and each tenth of the epoch draws evenly on the whole text."""
    length = 100_000
    order = permute(np.arange(length), length, seed=3, site="oslo", epoch=2)
    distance = np.abs(np.diff(order)).mean()
    assert abs(distance / (length / 3) - 1) < 0.02  # a third of the length for uniform order
    counts = np.stack([np.bincount(part // 10_000, minlength=10) for part in np.split(order, 10)])
    assert counts.min() > 850
    assert counts.max() < 1150


def test_the_order_is_frozen() -> None:
    """Golden: a change here would repeat and skip samples of every run that resumes."""
    assert permute(np.arange(8), 1000, seed=1, site="paris", epoch=0).tolist() == GOLDEN
