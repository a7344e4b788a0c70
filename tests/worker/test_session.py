"""A rank's conversation with a coordinator that is slow, away, back again, or says no.

Compared with: a real coordinator, stopped and started on its port. Run alone:
pytest tests/worker/test_session.py
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry
from support.live import Coordinator, coordinating, eventually
from support.runs import LAYOUT, config_of, create_store, shard_body, vector

from coordinator.store import Store
from loco.errors import RefusedError, UnreachableError
from loco.metrics import Catalogue, WireMetrics
from loco.wire.access import Access
from loco.wire.v1 import coordinator_pb2 as pb
from worker.lanes import LANES, STREAMS
from worker.session import MAX_PAUSE_SECONDS, Session

PAUSES = [0.1 * 2**i for i in range(6)]
CONFIG = config_of(quorum={"min_sites": 1}, run={"rounds": 3})


@contextlib.contextmanager
def session_to(address: str, site: str = "paris", patience: float = 60.0) -> Iterator[Session]:
    wire = WireMetrics(Catalogue(CollectorRegistry()))
    session = Session(address, site, patience, wire, Access(insecure=True))
    try:
        yield session
    finally:
        session.close()


def join(session: Session, site: str = "paris") -> pb.JoinResponse:
    run = session.get_run()
    joined = session.join(run, LAYOUT, 1, None)
    session.caller = pb.Caller(run_id=run.run_id, site=site, incarnation=joined.incarnation)
    return joined


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nothing listens, and nobody else will."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    with coordinating(create_store(tmp_path, CONFIG)) as running:
        yield running


def test_patience_has_an_end_that_names_address_and_remedy(nobody: str) -> None:
    with session_to(nobody, patience=0.5) as session, pytest.raises(UnreachableError) as caught:
        session.get_run()
    assert f"the coordinator at {nobody} did not answer" in str(caught.value)
    assert "--patience" in str(caught.value)
    assert session.retries >= 1


def test_no_patience_is_one_attempt(nobody: str) -> None:
    with session_to(nobody, patience=0.0) as session, pytest.raises(UnreachableError):
        session.get_run()
    assert session.retries == 0


def test_a_host_that_does_not_exist_is_the_same_error() -> None:
    address = "no-such-host.invalid:1"
    with session_to(address, patience=0.0) as session, pytest.raises(UnreachableError) as caught:
        session.get_run()
    assert address in str(caught.value)


def test_a_call_waits_for_a_coordinator_that_starts_later(tmp_path: Path) -> None:
    first = Coordinator(create_store(tmp_path, CONFIG))
    address = first.address
    first.stop()
    with session_to(address) as session:
        found: list[str] = []
        asking = threading.Thread(target=lambda: found.append(session.get_run().run_id))
        asking.start()
        eventually(lambda: session.retries > 2, "it was tried several times")
        later = Coordinator(Store.open(tmp_path), listen=address)
        asking.join(30)
        later.stop()
    assert found == ["test-run"]


def test_a_wait_goes_on_after_the_coordinator_was_away(tmp_path: Path) -> None:
    """Stopped while a site waits, started again on its port: the site gets its directive."""
    config = config_of(quorum={"min_sites": 2}, run={"rounds": 3})
    coordinator = Coordinator(create_store(tmp_path, config))
    address = coordinator.address
    with session_to(address) as session:
        join(session)
        digest = coordinator.state.theta_digest
        got: list[pb.WaitRoundResponse] = []
        waiting = threading.Thread(target=lambda: got.append(session.next_directive(0, digest)))
        waiting.start()
        eventually(lambda: coordinator.state.ready, "the site waits")
        coordinator.stop()
        eventually(lambda: session.away_seconds > 0, "the site has noticed")
        assert not got
        again = Coordinator(Store.open(tmp_path), listen=address)
        try:
            with session_to(address, "oslo") as oslo:
                join(oslo, "oslo")
                assert oslo.next_directive(0, digest).directive == pb.DIRECTIVE_TRAIN
                waiting.join(30)
            assert [answer.directive for answer in got] == [pb.DIRECTIVE_TRAIN]
            assert session.away_seconds == 0
        finally:
            again.stop()


def test_a_push_to_a_coordinator_that_is_away_arrives_when_it_is_back(tmp_path: Path) -> None:
    coordinator = Coordinator(create_store(tmp_path, CONFIG))
    address, digest = coordinator.address, coordinator.state.theta_digest
    with session_to(address) as session:
        join(session)
        assert session.next_directive(0, digest).directive == pb.DIRECTIVE_TRAIN
        coordinator.stop()
        body = shard_body(vector(LAYOUT, 1), CONFIG)
        header = pb.PushHeader(num_shards=1, tokens=5, inner_steps=1, theta_digest=digest)
        pushing = threading.Thread(target=lambda: session.push(header, body))
        pushing.start()
        eventually(lambda: session.retries > 0, "the push was tried")
        again = Coordinator(Store.open(tmp_path), listen=address)
        try:
            eventually(lambda: again.state.round == 1, "the contribution is in")
            pushing.join(30)
            assert session.push(header, body).duplicate  # whatever the first answer was
            assert list(again.state.updates[0].included) == ["paris"]
        finally:
            again.stop()


def test_a_join_whose_answer_was_lost_is_the_same_life(coordinator: Coordinator) -> None:
    with session_to(coordinator.address) as session:
        assert [join(session).incarnation for _ in range(3)] == [1, 1, 1]
    with session_to(coordinator.address) as restarted:
        assert join(restarted).incarnation == 2


def test_a_refusal_is_raised_at_once_with_reason_and_words(coordinator: Coordinator) -> None:
    with session_to(coordinator.address) as session:
        join(session)
        session.caller.incarnation = 99
        with pytest.raises(RefusedError, match="not a member") as caught:
            session.next_directive(0, "")
        assert caught.value.reason == "unknown_site"
        assert caught.value.exit_code == 3
        assert session.retries == 0


def test_goodbye_is_not_waited_for(nobody: str) -> None:
    with session_to(nobody, patience=3600.0) as session:
        session.leave("interrupted")


def test_a_wait_says_what_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log of a site that waits names what the run waits for."""
    monkeypatch.setattr("worker.session.POLL_SECONDS", 0.2)
    monkeypatch.setattr(logging.getLogger("loco"), "propagate", True)
    caplog.set_level(logging.INFO, logger="loco")
    config = config_of(quorum={"min_sites": 2})
    with (
        coordinating(create_store(tmp_path, config)) as coordinator,
        session_to(coordinator.address) as session,
        session_to(coordinator.address, "oslo") as oslo,
    ):
        join(session)
        digest = coordinator.state.theta_digest
        waiting = threading.Thread(target=lambda: session.next_directive(0, digest))
        waiting.start()
        eventually(lambda: "opens when 2 sites are ready; 1 are" in caplog.text, "it says so")
        join(oslo, "oslo")
        oslo.next_directive(0, digest)
        waiting.join(30)
        assert not waiting.is_alive()


def test_a_site_waits_for_others_longer_than_its_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Patience is for a coordinator that is away: a fast site must survive a slow one's start."""
    monkeypatch.setattr("worker.session.POLL_SECONDS", 0.1)
    config = config_of(quorum={"min_sites": 2})
    with (
        coordinating(create_store(tmp_path, config)) as coordinator,
        session_to(coordinator.address, patience=0.3) as fast,
        session_to(coordinator.address, "oslo") as slow,
    ):
        join(fast)
        digest = coordinator.state.theta_digest
        waiting = Future[pb.WaitRoundResponse]()
        thread = threading.Thread(
            target=lambda: waiting.set_result(fast.next_directive(0, digest)), daemon=True
        )
        thread.start()
        time.sleep(1.0)
        assert not waiting.done()
        join(slow, "oslo")
        slow.next_directive(0, digest)
        assert waiting.result(timeout=30).directive == pb.DIRECTIVE_TRAIN


def test_sites_that_try_again_pause_longer_and_longer_and_not_in_step(
    nobody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many sites that lost one coordinator must not all come back at the same moments."""
    pauses: dict[str, list[float]] = {}
    for site in ("paris", "oslo"):
        taken = pauses[site] = []
        monkeypatch.setattr("worker.session.time.sleep", taken.append)
        with session_to(nobody, site, patience=0.5) as session, pytest.raises(UnreachableError):
            session.get_run()
        assert len(taken) > 8
        assert all(0.5 * p <= t <= p for p, t in zip(PAUSES, taken, strict=False))
        assert max(taken) <= MAX_PAUSE_SECONDS
        assert taken[6] > 10 * taken[0]
    assert all(a != b for a, b in zip(*pauses.values(), strict=False))


def test_a_server_that_is_no_coordinator_is_named_at_once() -> None:
    """Another service, or a version without the method: nothing that waiting could cure."""
    with futures.ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        with session_to(address) as session, pytest.raises(UnreachableError) as caught:
            session.get_run()
        server.stop(0).wait()
    assert session.retries == 0
    assert address in str(caught.value)
    assert "the same version of loco on both sides" in str(caught.value)


def test_a_download_of_any_range(coordinator: Coordinator) -> None:
    with session_to(coordinator.address) as session:
        join(session)
        size = 4 * LAYOUT.num_elements
        whole = session.snapshot(0, range(size))
        assert len(whole) == size
        for span in (range(0), range(1, 9), range(5, size), range(size, size)):
            assert session.snapshot(0, span) == whole[span.start : span.stop]


def test_uploads_that_are_not_wanted_any_more_are_not_begun_and_a_close_ends_the_others(
    nobody: str,
) -> None:
    most, more = LANES * STREAMS, 6
    with session_to(nobody) as session:
        for shard in range(most + more):
            session.begin_push(pb.PushHeader(shard=shard, num_shards=most + more), b"body")
        begun = list(session._begun.values())
        eventually(lambda: sum(push.running() for push in begun) == most, "all threads are busy")
        session.forget_pushes()
        assert [push.cancelled() for push in begun] == [False] * most + [True] * more
        assert not session._begun
    assert all(isinstance(push.exception(30.0), UnreachableError) for push in begun[:most])
