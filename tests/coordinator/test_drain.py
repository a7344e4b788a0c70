"""What a coordinator that is told to stop does to requests in progress, and to a cancelled one.

Compared with: the journal, replayed by a new process, against the state before it. Run alone:
pytest tests/coordinator/test_drain.py
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest
from support.live import Coordinator, Member, eventually
from support.runs import config_of, create_store, shard_body, vector

from coordinator.engine import Engine
from coordinator.events import Event, SiteJoined, SiteReady
from coordinator.recovery import recover
from coordinator.store import Store
from loco.digest import bytes_digest
from loco.wire.blocks import make_block
from loco.wire.v1 import coordinator_pb2 as pb

ONE_SITE = config_of(quorum={"min_sites": 1}, run={"rounds": 3})


def test_a_push_in_progress_finishes_while_the_coordinator_drains(tmp_path: Path) -> None:
    store = create_store(tmp_path, ONE_SITE)
    coordinator = Coordinator(store)
    body = shard_body(vector(store.layout, 1), store.config)
    begun, go_on = threading.Event(), threading.Event()
    with Member(coordinator, "paris") as paris:
        paris.enter()
        header = paris.header(0, body)

        def messages() -> Iterator[pb.PushRequest]:
            yield pb.PushRequest(header=header)
            yield pb.PushRequest(block=make_block(body[:100]))
            begun.set()
            go_on.wait()
            yield pb.PushRequest(block=make_block(body[100:]))

        answer = paris.stub.Push.future(messages())
        assert begun.wait(10)
        stopping = threading.Thread(target=coordinator.stop)
        stopping.start()
        eventually(lambda: coordinator.running.engine.draining, "draining")
        go_on.set()
        assert answer.result(timeout=20) == pb.PushResponse()
        stopping.join()
    reopened = Store.open(tmp_path)
    state, _ = recover(reopened)
    reopened.close()
    assert state.complete == ("paris",) or state.round == 1


def test_a_push_that_hangs_is_sent_away_as_unavailable(tmp_path: Path) -> None:
    coordinator = Coordinator(create_store(tmp_path, ONE_SITE))
    begun, never = threading.Event(), threading.Event()
    with Member(coordinator, "paris") as paris:
        paris.enter()
        header = paris.header(0, b"x" * 10, digest=bytes_digest(b"x" * 10))

        def messages() -> Iterator[pb.PushRequest]:
            yield pb.PushRequest(header=header)
            begun.set()
            never.wait()

        answer = paris.stub.Push.future(messages())
        assert begun.wait(10)
        coordinator.stop()
        with pytest.raises(grpc.RpcError) as caught:
            answer.result(timeout=20)
        never.set()
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def test_waiting_sites_are_sent_away_as_unavailable(tmp_path: Path) -> None:
    config = config_of(quorum={"min_sites": 2})
    coordinator = Coordinator(create_store(tmp_path, config))
    with Member(coordinator, "paris") as paris:
        paris.join()
        request = pb.WaitRoundRequest(
            caller=paris.caller, theta_digest=coordinator.state.theta_digest, timeout_seconds=25
        )
        answer = paris.stub.WaitRound.future(request, timeout=30)
        eventually(lambda: coordinator.state.ready, "paris waits")
        coordinator.stop()
        with pytest.raises(grpc.RpcError) as caught:
            answer.result(timeout=20)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def test_a_cancelled_caller_does_not_part_the_journal_from_the_state(tmp_path: Path) -> None:
    """The disk is slow, and the client gives up while its event is being journaled."""
    store = create_store(tmp_path, ONE_SITE)
    slow, writing = threading.Event(), threading.Event()
    append = store.journal.append

    def append_slowly(events: Sequence[Event], at: float) -> None:
        writing.set()
        assert slow.wait(10)
        append(events, at)

    async def scenario() -> Engine:
        engine = Engine(store, lambda _event, _state: None)
        await engine.submit(SiteJoined(site="paris", instance="a", num_shards=1))
        store.journal.append = append_slowly  # type: ignore[method-assign]
        caller = asyncio.create_task(engine.submit(SiteReady(site="paris", incarnation=1)))
        assert await asyncio.to_thread(writing.wait, 10)
        caller.cancel()
        slow.set()
        await asyncio.gather(caller, return_exceptions=True)
        assert caller.cancelled()
        # The next event waits its turn, and finds the round opened by the one before.
        await engine.submit(SiteReady(site="paris", incarnation=1))
        await engine.stop()
        return engine

    engine = asyncio.run(scenario())
    assert engine.state.phase == "open"
    reopened = Store.open(tmp_path)
    kinds = [type(event).__name__ for _, event in reopened.journal.replay(after=0)]
    state, _ = recover(reopened)
    reopened.close()
    assert kinds == ["SiteJoined", "SiteReady", "RoundOpened", "SiteReady"]
    assert (state.phase, state.ready) == (engine.state.phase, engine.state.ready)
