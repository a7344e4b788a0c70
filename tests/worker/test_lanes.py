"""Cutting transfers in parts, and the books about them, against what was asked for.

pytest tests/worker/test_lanes.py
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from loco.wire.access import Access, Link
from worker.lanes import LANE_BYTES, Lanes, Moved, cut


@pytest.mark.parametrize(("ranks", "lanes"), [(1, 8), (2, 4), (3, 2), (8, 1), (64, 1)])
@pytest.mark.parametrize("size", [0, 1, LANE_BYTES, 2 * LANE_BYTES - 1, 2 * LANE_BYTES, 10**9 + 7])
def test_parts_follow_each_other_and_none_is_short(size: int, ranks: int, lanes: int) -> None:
    parts = cut(range(1000, 1000 + size), ranks)
    assert [number for part in parts for number in (part.start, part.stop)] == sorted(
        [1000, 1000 + size, *(2 * [part.start for part in parts[1:]])]
    )
    assert len(parts) == min(lanes, max(1, size // LANE_BYTES))
    assert len(parts) == 1 or min(map(len, parts)) >= LANE_BYTES


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    made = Lanes("127.0.0.1:1", Access())  # nothing is called, so nobody need listen
    yield made
    made.close()


def test_each_part_has_a_connection_of_its_own_and_results_keep_their_order(lanes: Lanes) -> None:
    all_here = threading.Barrier(4, timeout=20)

    def transfer(link: Link, part: int) -> tuple[int, int]:
        all_here.wait()
        return part, id(link)

    for _ in range(2):  # the second time none is opened
        done = lanes.each(transfer, range(4))
        assert [part for part, _ in done] == [0, 1, 2, 3]
        assert len({link for _, link in done}) == 4
    assert len(lanes._others) == 3


def test_a_part_that_fails_is_told_when_all_have_ended(lanes: Lanes) -> None:
    ended = []

    def transfer(_: Link, part: int) -> None:
        if part == 0:
            raise ValueError("the first one")
        time.sleep(0.2)
        ended.append(part)

    with pytest.raises(ValueError, match="the first one"):
        lanes.each(transfer, range(3))
    assert sorted(ended) == [1, 2]


def test_parts_that_go_side_by_side_count_their_time_once() -> None:
    moved = Moved()

    def move() -> None:
        with moved.moving(10):
            time.sleep(0.3)

    threads = [threading.Thread(target=move) for _ in range(4)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert moved.num_bytes == 40
    assert 0.3 <= moved.seconds <= time.monotonic() - started
    with pytest.raises(ValueError, match="broken"), moved.moving(1000):
        raise ValueError("broken")
    assert moved.num_bytes == 40
