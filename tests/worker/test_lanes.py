"""Handing out a transfer to connections, and the books about it, against what was asked for.

pytest tests/worker/test_lanes.py
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loco.wire.access import Access, Link
from worker.lanes import LANE_BYTES, STREAMS, Lanes, Moved, Ranges, num_lanes, num_shards


@pytest.mark.parametrize(
    ("ranks", "lanes", "shards"), [(1, 8, 48), (2, 4, 24), (3, 2, 16), (8, 1, 6), (64, 1, 1)]
)
@pytest.mark.parametrize("size", [0, 1, LANE_BYTES, 2 * LANE_BYTES - 1, 2 * LANE_BYTES, 10**9 + 7])
def test_ranks_share_the_connections_and_none_is_opened_for_little(
    size: int, ranks: int, lanes: int, shards: int
) -> None:
    assert num_lanes(size, ranks) == min(lanes, max(1, size // LANE_BYTES))
    assert num_shards(size, ranks) == min(shards, max(1, size // LANE_BYTES))


def test_no_connection_gets_one_shard_more_than_another() -> None:
    numbers = [num_shards(number * LANE_BYTES, num_ranks=1) for number in range(60)]
    assert numbers[:8] == [1, 1, 2, 3, 4, 5, 6, 7]
    assert all(
        8 * (number // 8) == shards
        for number, shards in zip(range(8, 48), numbers[8:48], strict=True)
    )
    assert numbers[48:] == 12 * [48]


near_a_boundary = st.builds(
    lambda parts, off: max(0, parts * LANE_BYTES + off), st.integers(0, 200), st.integers(-2, 2)
)


@settings(deadline=None)
@given(
    start=st.integers(0, 10**12),
    size=st.one_of(near_a_boundary, st.integers(0, 10**10)),
    takers=st.integers(1, 24),
)
def test_ranges_follow_each_other_and_are_few(start: int, size: int, takers: int) -> None:
    """Against the span: every byte once, in order; long ranges first, none short but the last."""
    ranges = Ranges(range(start, start + size), takers)
    taken = list(iter(ranges.take, None))
    assert ranges.take() is None
    assert [number for part in taken for number in (part.start, part.stop)] == sorted(
        [part.start for part in taken] + [part.stop for part in taken]
    )
    assert all(a.stop == b.start for a, b in itertools.pairwise(taken))
    assert sum(map(len, taken)) == size
    assert not taken or (taken[0].start, taken[-1].stop) == (start, start + size)
    assert all(len(part) >= LANE_BYTES for part in taken[:-1])
    assert all(len(a) >= len(b) for a, b in itertools.pairwise(taken))
    most = 4 * takers * (1 + math.log(max(1.0, size / (4 * takers * LANE_BYTES))))
    assert len(taken) <= most + 1


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    made = Lanes("127.0.0.1:1", Access())  # nothing is called, so nobody need listen
    yield made
    made.close()


def test_ranges_are_fetched_side_by_side_on_connections_that_are_kept(lanes: Lanes) -> None:
    span = range(7, 7 + 40 * LANE_BYTES)
    for _ in range(2):  # the second time no connection is opened
        begun, fetched = fetch_together(lanes, span, num_lanes=3)
        assert list(Counter(begun).values()) == 3 * [STREAMS]
        fetched.sort(key=lambda part: part.start)
        assert (fetched[0].start, fetched[-1].stop) == (span.start, span.stop)
        assert all(a.stop == b.start for a, b in itertools.pairwise(fetched))
    assert len(lanes._links) == 3


def fetch_together(lanes: Lanes, span: range, num_lanes: int) -> tuple[list[int], list[range]]:
    """The connections of the first ranges, which wait for each other; and all ranges."""
    all_here = threading.Barrier(num_lanes * STREAMS, timeout=20)
    calls, begun, fetched = itertools.count(), [], []

    def transfer(link: Link, part: range) -> None:
        if next(calls) < num_lanes * STREAMS:
            begun.append(id(link))
            all_here.wait()
        fetched.append(part)

    lanes.share(span, num_lanes, transfer)
    return begun, fetched


def test_who_is_fast_takes_more(lanes: Lanes) -> None:
    """One connection of four takes ten times as long for each byte."""
    bytes_of: Counter[int] = Counter()
    ended: dict[int, float] = {}
    slow: list[int] = []

    def transfer(link: Link, part: range) -> None:
        if not slow:
            slow.append(id(link))
        time.sleep(len(part) / LANE_BYTES * (0.05 if id(link) in slow else 0.005))
        bytes_of[id(link)] += len(part)
        ended[id(link)] = time.monotonic()

    started = time.monotonic()
    lanes.share(range(400 * LANE_BYTES), 4, transfer)
    in_equal_parts = 100 * 0.05 / STREAMS
    assert sum(bytes_of.values()) == 400 * LANE_BYTES
    assert bytes_of[slow[0]] < 0.1 * 400 * LANE_BYTES
    assert max(ended.values()) - started < 0.6 * in_equal_parts


@pytest.mark.parametrize("size", [0, 1, LANE_BYTES + 1])
def test_what_is_short_goes_on_the_first_connection(lanes: Lanes, size: int) -> None:
    fetched = []
    span = range(5, 5 + size)
    lanes.share(span, num_lanes(size, 1), lambda link, part: fetched.append((link, part)))
    assert fetched == [(lanes.first, span)]


def test_a_range_that_fails_is_told_when_all_have_ended_and_no_further_one_begins(
    lanes: Lanes,
) -> None:
    ended = []
    all_here = threading.Barrier(2 * STREAMS, timeout=20)

    def transfer(_: Link, part: range) -> None:
        all_here.wait()  # a further one would break it
        if part.start == 0:
            raise ValueError("the first one")
        time.sleep(0.2)
        ended.append(part)

    with pytest.raises(ValueError, match="the first one"):
        lanes.share(range(100 * LANE_BYTES), 2, transfer)
    assert len(ended) == 2 * STREAMS - 1
    assert not all_here.broken


def test_an_upload_that_has_sent_its_bytes_leaves_the_connection_to_the_next_one() -> None:
    """Six uploads on two connections: never two that send on one, though all wait for answers."""
    lanes = Lanes("127.0.0.1:1", Access(), num_lanes=2)
    all_sent = threading.Barrier(2 * STREAMS, timeout=20)
    sending: Counter[Link] = Counter()
    most: list[int] = []

    def upload(link: Link, sent: Callable[[], None]) -> Link:
        sending[link] += 1
        most.append(sending[link])
        time.sleep(0.02)
        sending[link] -= 1
        sent()
        all_sent.wait()
        return link

    began = [lanes.start(upload) for _ in range(2 * STREAMS)]
    links = Counter(done.result() for done in began)
    lanes.close()
    assert most == 2 * STREAMS * [1]
    assert len(links) == 2


@pytest.mark.parametrize("its_bytes_have_gone", [True, False])
def test_an_upload_that_fails_leaves_its_connection_too(
    lanes: Lanes, its_bytes_have_gone: bool
) -> None:
    def upload(_: Link, sent: Callable[[], None]) -> None:
        if its_bytes_have_gone:
            sent()
        raise ValueError("broken")

    def other(link: Link, _: Callable[[], None]) -> Link:
        return link

    for _ in range(2):
        failed = [lanes.start(upload) for _ in range(20)]
        assert all(isinstance(done.exception(), ValueError) for done in failed)
        assert {lanes.start(other).result() for _ in range(20)} == {lanes.first}


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
