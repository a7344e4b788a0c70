"""The layout: every element in exactly one place, mismatches named, shards and cells that tile.

Compared with: plain counting over random shapes (hypothesis). Run alone:
pytest tests/loco/test_layout.py
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loco.errors import ConfigError
from loco.layout import CELL_CHUNKS, CHUNK, Layout, cells

shapes = st.lists(st.integers(0, 60), max_size=4).map(tuple)
layouts = st.lists(shapes, max_size=12).map(
    lambda many: Layout.of((f"p{i}", shape) for i, shape in enumerate(many))
)


@given(layouts)
def test_parameters_start_on_chunks_and_never_overlap(layout: Layout) -> None:
    end = 0
    for p in layout.parameters:
        assert p.start == end
        assert p.start % CHUNK == 0
        assert p.numel == math.prod(p.shape)
        end += -(-p.numel // CHUNK) * CHUNK
    assert layout.num_elements == end
    assert layout.num_parameters == sum(math.prod(p.shape) for p in layout.parameters)
    assert layout.dense_bytes == 4 * layout.num_parameters


@given(layouts, st.integers(1, 9))
def test_every_row_is_in_exactly_one_shard_and_shards_are_even(layout: Layout, count: int) -> None:
    shards = [layout.shard(i, count) for i in range(count)]
    assert [row for shard in shards for row in shard] == list(range(layout.num_chunks))
    sizes = [len(shard) for shard in shards]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(0, 5 * CELL_CHUNKS), st.integers(0, 3 * CELL_CHUNKS))
def test_cells_tile_the_rows_at_the_global_grid(start: int, length: int) -> None:
    rows = range(start, start + length)
    parts = list(cells(rows))
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert sum(len(part) for part in parts) == length
    for part in parts:
        assert part
        assert part.start // CELL_CHUNKS == (part.stop - 1) // CELL_CHUNKS


@given(layouts)
def test_json_brings_it_back_with_its_fingerprint(layout: Layout) -> None:
    back = Layout.from_json(layout.to_json())
    assert back == layout
    assert back.fingerprint == layout.fingerprint


@given(layouts)
def test_the_parameter_of_an_element_holds_it(layout: Layout) -> None:
    for p in layout.parameters:
        for element in {p.start, p.start + p.numel // 2, p.start + p.numel - 1} if p.numel else ():
            assert layout.parameter_at(element) == p


def test_names_shapes_and_order_change_the_fingerprint() -> None:
    base = [("a", (2, 3)), ("b", (4,))]
    others = [
        base[::-1],
        [("a", (3, 2)), ("b", (4,))],
        [("a", (6,)), ("b", (4,))],
        [("c", (2, 3)), ("b", (4,))],
        base[:1],
    ]
    fingerprints = {Layout.of(shapes).fingerprint for shapes in [base, *others]}
    assert len(fingerprints) == 6


@pytest.mark.parametrize(
    ("mine", "theirs", "told"),
    [
        (
            [("a", (2,)), ("w", (3, 4))],
            [("a", (2,)), ("w", (4, 3))],
            "paris has w [3, 4], the run has w [4, 3]",
        ),
        ([("a", ())], [("b", ())], "paris has a [], the run has b []"),
        ([("a", (2,)), ("b", (5,))], [("a", (2,))], "only paris has b [5]"),
        ([("a", (2,))], [("a", (2,)), ("b", (5,))], "only the run has b [5]"),
    ],
)
def test_a_mismatch_names_the_tensor_and_both_shapes(
    mine: list[tuple[str, tuple[int, ...]]], theirs: list[tuple[str, tuple[int, ...]]], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Layout.of(mine).check_same(Layout.of(theirs), mine="paris", theirs="the run")
    assert told in str(caught.value)


@given(layouts)
def test_a_layout_is_the_same_as_itself(layout: Layout) -> None:
    layout.check_same(Layout.from_json(layout.to_json()), mine="a", theirs="b")
