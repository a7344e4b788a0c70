"""Transfers that break, stall or are damaged: what moves again, and what is noticed.

Compared with: bytes counted by a proxy, the session's own counters, and the bytes themselves. Run
alone: pytest tests/integration/test_transfer.py
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from chaos.numpy_site import NumpySite
from chaos.proxy import Direction, Proxy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.live import Coordinator, coordinating, eventually, refusal
from support.runs import config_of, create_store

from coordinator import upload
from loco.errors import UnreachableError
from loco.layout import Layout
from loco.wire.blocks import make_block
from loco.wire.protocol import BLOCK_BYTES
from loco.wire.v1 import coordinator_pb2 as pb
from loco.wire.v1 import coordinator_pb2_grpc as pb_grpc
from worker import lanes, stall

# Dense contributions of four blocks.
LAYOUT = Layout.of([("weight", (256, 1024))])
CONFIG = config_of(
    codec={"bits": 32}, outer={"aggregation": "mean"}, quorum={"min_sites": 1}, run={"rounds": 50}
)
BODY_BYTES = 4 * LAYOUT.num_parameters
OFF = st.integers(-2, 2)


@contextlib.contextmanager
def behind_a_proxy(tmp_path: Path) -> Iterator[tuple[Coordinator, Proxy, NumpySite]]:
    """A site that has joined, its line, and the coordinator."""
    with coordinating(create_store(tmp_path, CONFIG, layout=LAYOUT)) as coordinator:
        host, port = coordinator.address.split(":")
        proxy = Proxy((host, int(port)))
        site = NumpySite(proxy.address, "paris", LAYOUT)
        site.join()
        try:
            yield coordinator, proxy, site
        finally:
            site.close()
            proxy.close()


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NumpySite]:
    """A site that has joined and holds theta of round 0."""
    folder = tmp_path_factory.mktemp("run")
    with coordinating(create_store(folder, CONFIG, layout=LAYOUT)) as coordinator:
        site = NumpySite(coordinator.address, "paris", LAYOUT)
        site.join()
        yield site
        site.close()


def cut(proxy: Proxy, direction: Direction, after: int) -> None:
    """Reset the connection that carries this byte, at a rate at which the receiver keeps up.

    A reset takes with it what the receiver's kernel holds and nobody has read yet.
    """
    proxy.change(cut_after={direction: after}, bytes_per_second=2e6)


def test_an_upload_goes_on_where_its_connection_broke(tmp_path: Path) -> None:
    with behind_a_proxy(tmp_path) as (coordinator, proxy, site):
        before = proxy.passed["up"]
        cut(proxy, "up", after=3 * BLOCK_BYTES - BLOCK_BYTES // 2)
        site.follow()
        assert proxy.cuts == 1
        assert site.session.resumed_bytes >= BLOCK_BYTES
        moved = proxy.passed["up"] - before
        assert moved < BODY_BYTES + 2 * BLOCK_BYTES  # anew it would be 2.5: the torn block, frames
        eventually(lambda: coordinator.state.round == 1, "the round is committed")
        site.follow()
        assert site.fates[0].included


def test_downloads_go_on_where_their_connection_broke(tmp_path: Path) -> None:
    with behind_a_proxy(tmp_path) as (coordinator, proxy, site):
        site.follow()
        eventually(lambda: coordinator.state.round == 1, "the round is committed")
        before = proxy.passed["down"]
        cut(proxy, "down", after=3 * BLOCK_BYTES - BLOCK_BYTES // 2)
        site.follow()
        assert proxy.cuts == 1
        assert site.session.resumed_bytes >= BLOCK_BYTES
        assert proxy.passed["down"] - before < BODY_BYTES + 1.5 * BLOCK_BYTES
        assert site.digest == coordinator.state.theta_digest


@pytest.mark.parametrize("lane_bytes", [BODY_BYTES, BLOCK_BYTES // 4])
def test_transfers_keep_below_the_rate_that_a_site_allows(
    lane_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "LANE_BYTES", lane_bytes)
    rate = 2e6
    with behind_a_proxy(tmp_path) as (coordinator, _, site):
        for throttle in (site.session._up, site.session._down):
            throttle._rate = rate
        for _ in ("up", "down"):
            started = time.monotonic()
            site.follow()
            assert time.monotonic() - started > (BODY_BYTES - 2 * BLOCK_BYTES) / rate
            eventually(lambda: coordinator.state.round == 1, "the round is committed")
        assert site.round == 1


def test_ranges_go_side_by_side_and_each_goes_on_where_it_broke(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "LANE_BYTES", 2 * BLOCK_BYTES)
    with behind_a_proxy(tmp_path) as (coordinator, proxy, site):
        site.follow()
        eventually(lambda: coordinator.state.round == 1, "the round is committed")
        before = proxy.passed["down"]
        cut(proxy, "down", after=3 * BLOCK_BYTES - BLOCK_BYTES // 2)
        site.follow()
        assert proxy.cuts == 1
        assert len(site.session._lanes._links) == 2
        assert proxy.passed["down"] - before < BODY_BYTES + 2.5 * BLOCK_BYTES  # two torn, frames
        assert site.digest == coordinator.state.theta_digest


def test_a_slow_connection_does_not_hold_up_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two connections, one of them behind a slow line: it gets the few ranges that it can carry."""
    rate = 50e3
    with behind_a_proxy(tmp_path) as (coordinator, fast, site):
        monkeypatch.setattr(lanes, "LANES", 2)
        monkeypatch.setattr(lanes, "LANE_BYTES", 16 * 1024)
        host, port = coordinator.address.split(":")
        slow = Proxy((host, int(port)))
        slow.change(bytes_per_second=rate)
        site.session._lanes._address = slow.address  # of connections that are not open yet
        moved, started = site.session.down.num_bytes, time.monotonic()
        theta = site.session.snapshot(0, range(BODY_BYTES))
        seconds = time.monotonic() - started
        whole = fast.passed["down"] + slow.passed["down"]
        slow.close()
        assert theta == site.theta.tobytes()
        assert site.session.down.num_bytes - moved == BODY_BYTES
        assert 0.05 * BODY_BYTES < slow.passed["down"] < 0.25 * BODY_BYTES
        assert whole < 2.1 * BODY_BYTES  # theta came once before
        assert seconds < 0.5 * (BODY_BYTES / 2) / rate  # half of what equal parts take


def test_a_session_that_is_closed_ends_its_downloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "LANE_BYTES", BLOCK_BYTES // 4)
    with behind_a_proxy(tmp_path) as (_, proxy, site), futures.ThreadPoolExecutor(1) as pool:
        proxy.change(bytes_per_second=200e3)
        before = proxy.passed["down"]
        download = pool.submit(site.session.snapshot, 0, range(BODY_BYTES))
        eventually(lambda: proxy.passed["down"] > before + BLOCK_BYTES, "some of it has come")
        site.session.close()
        with pytest.raises(UnreachableError):
            download.result(timeout=10)


@given(
    start=st.integers(0, 40_000),
    size=st.builds(lambda parts, off: max(0, 4096 * parts + off), st.integers(0, 12), OFF),
)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_bytes_come_in_their_order(
    monkeypatch: pytest.MonkeyPatch, standing: NumpySite, start: int, size: int
) -> None:
    """Sizes around those at which one more range or connection is taken, against the whole."""
    monkeypatch.setattr(lanes, "LANE_BYTES", 4096)
    wanted = standing.theta.tobytes()[start : start + size]
    assert standing.session.snapshot(0, range(start, start + size)) == wanted


@pytest.mark.parametrize("direction", ["up", "down"])
def test_damaged_blocks_are_noticed_and_moved_again(direction: str, tmp_path: Path) -> None:
    with behind_a_proxy(tmp_path) as (coordinator, proxy, site):
        proxy.change(corrupt={direction: 2})
        for round_ in range(2):
            while site.round == round_:
                site.follow()
        assert proxy.corrupted == 2
        assert site.session.retries >= 1
        assert site.digest == coordinator.state.theta_digest
        assert all(fate.included for fate in site.fates.values())
        assert coordinator.metric("loco_rejections_total", reason="corrupt") == 0


def test_bytes_that_a_power_cut_tore_are_sent_again_and_no_fault_of_the_site(
    tmp_path: Path,
) -> None:
    """What had arrived is another thing on disk than it was: only the whole digest can tell."""
    with behind_a_proxy(tmp_path) as (coordinator, proxy, site):
        incoming = coordinator.store.directory / "incoming"
        cut(proxy, "up", after=2 * BLOCK_BYTES + BLOCK_BYTES // 2)
        done = threading.Thread(target=site.follow)
        offset = site.session._push_offset

        def torn(header: pb.PushHeader) -> int:
            """Between the cut and the next stream."""
            (file,) = [path for path in incoming.rglob("*") if path.is_file()]
            data = bytearray(file.read_bytes())
            if data:
                data[0] ^= 1
                file.write_bytes(data)
            site.session._push_offset = offset  # type: ignore[method-assign]
            return offset(header)

        site.session._push_offset = torn  # type: ignore[method-assign]
        done.start()
        done.join(30)
        assert site.acknowledged == {0}
        assert proxy.cuts == 1
        assert coordinator.state.sites["paris"].refusals == 0
        eventually(lambda: coordinator.state.round == 1, "the round is committed")


def test_the_coordinator_notices_a_peer_that_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "STALL_SECONDS", 0.5)
    with behind_a_proxy(tmp_path) as (_, _, site):
        site.session.next_directive(0, site.digest)  # which opens the round
        header = pb.PushHeader(
            caller=site.session.caller,
            round=0,
            num_shards=1,
            size_bytes=BODY_BYTES,
            digest=bytes(16),
            tokens=1,
            inner_steps=1,
            theta_digest=site.digest,
        )
        never = threading.Event()

        def messages() -> Iterator[pb.PushRequest]:
            yield pb.PushRequest(header=header)
            never.wait(20)

        with pytest.raises(grpc.RpcError) as caught:
            site.session._stub.Push(messages(), timeout=15)
        never.set()
        reason, message = refusal(caught.value)
        assert reason == "slow"  # counted; the site tries again
        assert "nothing came" in message


class _StandsStill(pb_grpc.CoordinatorServiceServicer):
    """Answers the first Pull with one block and then moves nothing, while gRPC answers pings."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.offsets: list[int] = []
        self.never = threading.Event()
        self._calls = itertools.count()

    def Pull(self, request: pb.PullRequest, _context: Any) -> Iterator[pb.PullResponse]:  # noqa: N802
        stands_still = next(self._calls) == 0
        self.offsets.append(request.offset)
        blocks = range(request.offset, request.offset + request.length, BLOCK_BYTES)
        for start in blocks:
            yield pb.PullResponse(block=make_block(self.data[start : start + BLOCK_BYTES]))
            if stands_still:
                self.never.wait(20)


@pytest.mark.parametrize("num_lanes", [1, 2])
def test_a_site_notices_a_coordinator_that_stands_still(
    num_lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where others go on: what stands still is alone when they have ended."""
    monkeypatch.setattr(stall, "STALL_SECONDS", 0.5)
    if num_lanes == 2:
        monkeypatch.setattr(lanes, "LANE_BYTES", 3 * BLOCK_BYTES)
    data = np.random.default_rng(0).bytes(3 * BLOCK_BYTES * num_lanes)
    servicer = _StandsStill(data)
    server = grpc.server(futures.ThreadPoolExecutor(4))
    pb_grpc.add_CoordinatorServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    site = NumpySite(f"127.0.0.1:{port}", "paris", LAYOUT)
    assert site.session.pull(0, range(len(data))) == data
    begun = [*range(0, len(data), 3 * BLOCK_BYTES)]
    (again,) = set(servicer.offsets).difference(begun)
    assert sorted(servicer.offsets) == sorted([*begun, again])
    assert again - BLOCK_BYTES in begun
    assert site.session.resumed_bytes == BLOCK_BYTES
    servicer.never.set()
    site.session.close()
    server.stop(0).wait()


def test_calls_that_take_turns_do_not_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow line each moves rarely: none is cancelled while another one moves."""
    monkeypatch.setattr(stall, "STALL_SECONDS", 0.5)
    cancelled = threading.Event()
    motion = stall.Motion()
    with stall.Watch(motion) as waits, stall.Watch(motion) as moves:
        waits.start(cancelled.set)
        moves.start(lambda: None)
        for _ in range(10):
            assert not cancelled.wait(0.1)
            moves.moved()
        assert cancelled.wait(5)
