"""The code of masks: any set of positions comes back, in exactly the bytes that both ends expect.

Alone: python -m pytest tests/loco/inner/test_maskwire.py
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loco.inner.maskwire import decode, encode, wire_bytes


@st.composite
def masks(draw: st.DrawFn) -> tuple[int, list[int]]:
    n = draw(st.integers(1, 400))
    return n, sorted(draw(st.sets(st.integers(0, n - 1), max_size=n)))


@settings(deadline=None)
@given(masks())
def test_any_mask_comes_back_in_the_agreed_size(mask: tuple[int, list[int]]) -> None:
    n, positions = mask
    code = encode(torch.tensor(positions, dtype=torch.int64), n)
    assert code.dtype == torch.uint8
    assert code.numel() == wire_bytes(n, len(positions))
    assert decode(code, n, len(positions)).tolist() == positions


@pytest.mark.parametrize("density", [0.5, 0.25, 0.1, 0.03, 0.01, 0.001])
@pytest.mark.parametrize("clustered", [False, True])
def test_large_masks_stay_below_the_stated_bound(density: float, clustered: bool) -> None:
    n = 1_000_003
    k = round(density * n)
    torch.manual_seed(0)
    order = torch.arange(n - k, n) if clustered else torch.randperm(n)[:k].sort().values
    code = encode(order, n)
    assert torch.equal(decode(code, n, k), order)
    assert 8 * code.numel() <= min(n, k * (2 + math.log2(n / k))) + 16
    entropy = -(density * math.log2(density) + (1 - density) * math.log2(1 - density))
    assert 8 * code.numel() >= 0.99 * n * entropy or clustered


def test_nothing_travels_when_there_is_nothing_to_tell() -> None:
    assert wire_bytes(50, 50) == wire_bytes(50, 0) == wire_bytes(0, 0) == 0
    assert decode(torch.empty(0, dtype=torch.uint8), 50, 50).tolist() == list(range(50))


def test_golden_bytes() -> None:
    """Elias-Fano by hand: n = 20, k = 3 has two low bits; 5 = 1|01, 6 = 1|10, 17 = 4|01."""
    # High parts 1, 1, 4 plus 0, 1, 2 are bits 1, 2 and 6; low bits, least first: 10 01 10.
    assert encode(torch.tensor([5, 6, 17]), 20).tolist() == [0b1000110, 0b011001]
