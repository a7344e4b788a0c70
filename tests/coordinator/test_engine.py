"""Events that come together, stepped together: one sync for all of them, and all or none on disk.

Compared with: the same events submitted one by one to another engine (state and journal), and the
answers that each alone would have got. Run alone: pytest tests/coordinator/test_engine.py
"""

from __future__ import annotations

import asyncio
import errno
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.runs import config_of, create_store

from coordinator.engine import Answer, Engine
from coordinator.events import Duplicate, Event, Heard, Refuse, ShardStored, SiteJoined, SiteReady
from coordinator.journal import Journal
from coordinator.recovery import recover
from coordinator.state import State
from coordinator.store import Store

CONFIG = config_of(quorum={"min_sites": 3, "grace_seconds": 60.0}, run={"rounds": 3})
SITES = ("oslo", "paris", "rome")


class HeldJournal:
    """Lets the test decide when an append goes on, and remembers how many events came with it."""

    def __init__(self, journal: Journal) -> None:
        self._append = journal.append
        self.go_on = threading.Event()
        self.sizes: list[int] = []
        self.full = False
        journal.append = self.append  # type: ignore[method-assign]

    def append(self, events: Sequence[Event], at: float) -> None:
        self.sizes.append(len(events))
        assert self.go_on.wait(20)
        if self.full:
            raise sqlite3.OperationalError("database or disk is full")
        self._append(events, at)


def shard(site: str, digest: str = "d") -> ShardStored:
    return ShardStored(
        site=site,
        incarnation=1,
        round=0,
        fragment=0,
        shard=0,
        num_shards=1,
        size_bytes=10,
        digest=digest,
        tokens=10,
        inner_steps=5,
        data_cursor=5,
    )


async def opened(store: Store) -> Engine:
    """An engine whose round 0 is open for all sites."""
    engine = Engine(store, lambda _event, _state: None)
    for site in SITES:
        await engine.submit(SiteJoined(site=site, instance="a", num_shards=1))
    for site in SITES:
        await engine.submit(SiteReady(site=site, incarnation=1))
    assert engine.state.phase == "open"
    return engine


async def while_one_is_journaled(
    engine: Engine, held: HeldJournal, first: Event, others: Sequence[Event]
) -> list[Answer]:
    """Submit the others while the journal has the first one in hand; all answers, in order."""
    asked = [asyncio.create_task(engine.submit(first))]
    while not held.sizes:
        await asyncio.sleep(0.001)
    asked += [asyncio.create_task(engine.submit(event)) for event in others]
    await asyncio.sleep(0.01)
    held.go_on.set()
    return await asyncio.gather(*asked)


def journaled(directory: Path) -> tuple[list[Event], State]:
    store = Store.open(directory)
    events = [event for _, event in store.journal.replay(after=0)]
    state, _ = recover(store)
    store.close()
    return events, state


def test_events_that_wait_are_journaled_with_one_sync_in_their_order(tmp_path: Path) -> None:
    events = [shard("paris"), shard("paris"), shard("paris", "other"), shard("oslo")]

    async def together() -> list[Answer]:
        engine = await opened(create_store(tmp_path / "together", CONFIG))
        held = HeldJournal(engine.store.journal)
        answers = await while_one_is_journaled(engine, held, events[0], events[1:])
        assert held.sizes == [1, 1], "the repeat and the conflict write nothing"
        await engine.stop()
        return answers

    async def one_by_one() -> list[Answer]:
        engine = await opened(create_store(tmp_path / "alone", CONFIG))
        answers = [await engine.submit(event) for event in events]
        await engine.stop()
        return answers

    answers = asyncio.run(together())
    assert answers == asyncio.run(one_by_one())
    assert [type(answer) for answer in answers] == [type(None), Duplicate, Refuse, type(None)]
    assert journaled(tmp_path / "together")[0] == journaled(tmp_path / "alone")[0]


def test_what_the_machine_decides_is_journaled_with_what_made_it_decide(tmp_path: Path) -> None:
    """The last contribution closes the round: both are there after a crash, or neither."""

    async def scenario() -> tuple[list[int], State]:
        engine = await opened(create_store(tmp_path, CONFIG))
        held = HeldJournal(engine.store.journal)
        await while_one_is_journaled(engine, held, shard("oslo"), [shard("paris"), shard("rome")])
        state = engine.state
        sizes = held.sizes[:2]
        for task in list(engine._tasks):  # the reduction: there are no files to reduce
            task.cancel()
        await engine.stop()
        return sizes, state

    sizes, state = asyncio.run(scenario())
    assert sizes == [1, 3], "two shards and the close"
    assert state.phase == "closing"
    events, recovered = journaled(tmp_path)
    assert [type(event).__name__ for event in events[-2:]] == ["ShardStored", "RoundClosed"]
    assert (recovered.phase, recovered.included) == (state.phase, state.included)


@pytest.mark.parametrize("room_again", [False, True])
def test_a_full_disk_refuses_what_would_be_journaled_and_nothing_else(
    tmp_path: Path, room_again: bool
) -> None:
    """Also the repeat of an event that did not happen: its sender must not think it was kept."""

    async def scenario() -> State:
        engine = await opened(create_store(tmp_path, CONFIG))
        held = HeldJournal(engine.store.journal)
        held.full = True
        before = engine.state.sites["rome"].heard_at
        heard = Heard(site="rome", incarnation=1)
        others = [shard("paris"), shard("paris"), heard]
        answers = await while_one_is_journaled(engine, held, shard("oslo"), others)
        refused = [answer.reason for answer in answers[:3] if isinstance(answer, Refuse)]
        assert refused == ["disk_full"] * 3
        assert answers[3] is None
        assert engine.state.sites["rome"].heard_at > before
        assert engine.state.contributions == {}
        if room_again:
            held.full = False
            assert await engine.submit(shard("paris")) is None
        await engine.stop()
        return engine.state

    state = asyncio.run(scenario())
    assert state.complete == (("paris",) if room_again else ())
    assert journaled(tmp_path)[1].complete == state.complete


def test_a_database_that_cannot_grow_is_waited_for_like_any_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also the journal's compaction writes."""
    monkeypatch.setattr("coordinator.engine.RETRY_SECONDS", 0.0)
    failures = [
        sqlite3.OperationalError("database or disk is full"),
        OSError(errno.ENOSPC, "No space left on device"),
    ]

    def work() -> str:
        if failures:
            raise failures.pop()
        return "done"

    async def scenario() -> str:
        engine = await opened(create_store(tmp_path, CONFIG))
        done = await engine._until_room(work)
        await engine.stop()
        return done

    assert asyncio.run(scenario()) == "done"
    assert caplog.text.count("the coordinator's disk is full") == 2
