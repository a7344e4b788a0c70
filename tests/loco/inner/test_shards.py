"""How the flat vector is divided: every element has one owner, shares are even, k is exact.

Alone: python -m pytest tests/loco/inner/test_shards.py
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loco.inner.mask import mask_from_marks, select
from loco.inner.shards import make_regions, make_shards

layouts = st.lists(
    st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=5),
    min_size=1,
    max_size=3,
).filter(lambda groups: any(size for group in groups for size, _ in group))


@settings(deadline=None)
@given(layouts, st.integers(1, 7))
def test_shards_are_an_even_partition(groups: list[list[tuple[int, bool]]], size: int) -> None:
    regions = make_regions(groups)
    n = sum(size for group in groups for size, _ in group)
    assert sum(r.stop - r.start for r in regions) == n
    shards = make_shards(regions, size)
    flat = torch.arange(n)
    taken = [shard.take(flat) for shard in shards]
    assert torch.cat(taken).sort().values.tolist() == list(range(n))
    lengths = [shard.length for shard in shards]
    assert max(lengths) - min(lengths) <= 1
    copy = torch.zeros_like(flat)
    for shard, values in zip(shards, taken, strict=True):
        assert torch.equal(shard.to_flat(torch.arange(shard.length)), values)
        shard.put(copy, values)
    assert torch.equal(copy, flat)


@settings(deadline=None)
@given(layouts, st.integers(1, 5), st.floats(0.01, 1.0))
def test_the_mask_keeps_exactly_k_of_every_slice(
    groups: list[list[tuple[int, bool]]], size: int, density: float
) -> None:
    shards = make_shards(make_regions(groups), size)
    for shard in shards:
        scores = torch.rand(shard.sparse_length, generator=torch.Generator().manual_seed(1))
        chosen = select(scores, shard, density)
        assert chosen.tolist() == sorted(set(chosen.tolist()))
        start = 0
        for length, k in shard.slices(density):
            inside = chosen[(chosen >= start) & (chosen < start + length)] - start
            assert inside.numel() == k == max(1, round(density * length))
            part = scores[start : start + length]
            assert part[inside].min() >= part.topk(k).values[-1]
            start += length
        assert start == shard.sparse_length


def test_slices_are_where_a_piece_meets_a_tensor() -> None:
    regions = make_regions([[(10, True), (3, False), (6, True)], [(5, True)]])
    assert [(r.start, r.stop, r.group, r.sparse) for r in regions] == [
        (0, 16, 0, True),
        (16, 21, 1, True),
        (21, 24, 0, False),
    ]
    first, second = make_shards(regions, 2)
    assert first.slices(0.5) == [(8, 4), (3, 2)]
    assert second.slices(0.5) == [(2, 1), (6, 3), (2, 1)]
    assert (first.length, first.sparse_length) == (12, 11)


def test_a_mask_survives_being_written_as_marks() -> None:
    shards = make_shards(make_regions([[(10, True), (3, False)]]), 3)
    marks = torch.tensor([0, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1], dtype=torch.bool)
    mask = mask_from_marks(shards, marks)
    assert torch.equal(mask.marks(13), marks)
    assert mask.counts == [2, 3, 2]
    assert [mask.positions[mask.part(r)].tolist() for r in range(3)] == [
        [1, 10],
        [4, 5, 11],
        [9, 12],
    ]
