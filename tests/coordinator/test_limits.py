"""Limits: the accounts against a clock of the test, and a real coordinator against rough peers.

What is compared: how many requests pass in a time with what the config says; whether a good site is
served meanwhile; and that nothing is left behind. Every reason of a refusal has its case in
test_refusals.py. Run alone: pytest tests/coordinator/test_limits.py
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.certs import Certs
from support.live import Coordinator, Member, coordinating, eventually, refusal
from support.runs import LAYOUT, config_of, create_store, shard_body, vector

from coordinator import finish, server, upload
from coordinator.limits import Limits
from coordinator.refused import RefusedRequest
from loco.config import LimitsConfig
from loco.wire.blocks import make_block
from loco.wire.protocol import MAX_MESSAGE_BYTES
from loco.wire.v1 import coordinator_pb2 as pb

CONFIG = config_of(quorum={"min_sites": 2})
BODY = shard_body(vector(LAYOUT, 1), CONFIG)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def passes(limits: Limits, caller: str) -> bool:
    try:
        with limits.call(caller):
            return True
    except RefusedRequest:
        return False


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(0.0, 0.3), min_size=1, max_size=300))
def test_never_more_than_the_burst_and_the_rate(pauses: list[float]) -> None:
    """In any stretch of time, from its first request on."""
    clock = Clock()
    limits = Limits(LimitsConfig(requests_per_second=10.0, burst_seconds=2.0), clock)
    times = []
    for pause in pauses:
        clock.now += pause
        if passes(limits, "paris"):
            times.append(clock.now)
    for begin in range(len(times)):
        for end in range(begin, len(times)):
            assert end - begin + 1 <= 20 + 10 * (times[end] - times[begin]) + 1e-6


def test_whoever_keeps_to_the_rate_is_never_refused() -> None:
    clock = Clock()
    limits = Limits(LimitsConfig(requests_per_second=8.0, burst_seconds=1.0), clock)
    for _ in range(10_000):
        clock.now += 0.125
        assert passes(limits, "paris")


def test_callers_have_accounts_of_their_own() -> None:
    limits = Limits(LimitsConfig(requests_per_second=1.0, burst_seconds=3.0), Clock())
    assert [passes(limits, "paris") for _ in range(4)] == [True, True, True, False]
    assert passes(limits, "oslo")


def test_a_call_that_costs_more_counts_as_more_and_is_never_impossible() -> None:
    clock = Clock()
    limits = Limits(LimitsConfig(requests_per_second=4.0, burst_seconds=2.0), clock)
    for counts_as, seconds in ((3.0, 0.75), (100.0, 2.0)):
        clock.now += 10.0
        passed = []
        for _ in range(3):
            with contextlib.suppress(RefusedRequest), limits.call("paris", counts_as):
                passed.append(counts_as)
        assert len(passed) == 8 // min(counts_as, 8.0)
        clock.now += seconds
        with limits.call("paris", counts_as):
            pass


def test_strangers_do_not_fill_the_memory() -> None:
    limits = Limits(LimitsConfig(), Clock())
    for i in range(20_000):
        assert passes(limits, f"ipv4:10.0.0.1:{i}")
    assert len(limits._requests._of) <= 4096
    assert not limits._calls


def test_a_stream_that_is_too_fast_waits() -> None:
    """20 messages at once, then 100 a second: 40 take 0.2 s."""
    limits = Limits(LimitsConfig(messages_per_second=100.0, burst_seconds=0.2))

    async def send() -> float:
        began = time.monotonic()
        for _ in range(40):
            await limits.message("paris")
        return time.monotonic() - began

    assert asyncio.run(send()) >= 0.19


# --- rough peers ----------------------------------------------------------------------------------


@contextlib.contextmanager
def connections(address: str, count: int) -> Iterator[list[socket.socket]]:
    """TCP connections that never say a word."""
    host, port = address.split(":")
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection((host, int(port)), 10))
            for _ in range(count)
        ]


def num_closed(sockets: list[socket.socket], within: float) -> int:
    until, closed = time.monotonic() + within, set[int]()
    while time.monotonic() < until and len(closed) < len(sockets):
        for connection in sockets:
            connection.settimeout(0.01)
            with contextlib.suppress(TimeoutError):
                try:
                    gone = connection.recv(4096) == b""
                except ConnectionResetError:
                    gone = True
                if gone:
                    closed.add(connection.fileno())
    return len(closed)


def test_silent_connections_end_and_a_good_site_is_served_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_SECONDS", 2.0)
    certs = Certs(tmp_path / "certs")
    with (
        coordinating(create_store(tmp_path / "state", CONFIG), certs) as coordinator,
        connections(coordinator.address, 50) as silent,
        Member(coordinator, "paris") as paris,
    ):
        paris.enter()
        assert num_closed(silent, within=0.2) == 0
        assert num_closed(silent, within=10.0) == 50


def test_connections_beyond_the_most_are_closed_at_once(tmp_path: Path) -> None:
    config = config_of(quorum={"min_sites": 2}, limits={"connections": 5})
    certs = Certs(tmp_path / "certs")
    with (
        coordinating(create_store(tmp_path / "state", config), certs) as coordinator,
        connections(coordinator.address, 8) as silent,
    ):
        assert num_closed(silent, within=2.0) == 3


def test_connections_leave_files_for_the_coordinator_itself() -> None:
    """A shell usually gives 1,024, fewer than limits.connections: strangers could take them all."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (300, 700));"
        "from coordinator.server import _options; from loco.config import Config;"
        "print(dict(_options(Config()))['grpc.max_allowed_incoming_connections'],"
        "resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split(maxsplit=1) == ["188", "(700, 700)\n"]
    assert "limits.connections is 4096" in done.stderr


def test_a_message_that_is_too_large_is_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    with (
        coordinating(create_store(tmp_path, CONFIG)) as coordinator,
        Member(coordinator, "paris") as paris,
        Member(coordinator, "oslo") as oslo,
    ):
        paris.enter()
        oslo.enter()
        with grpc.insecure_channel(coordinator.address) as channel:  # whose own limit is off
            push = channel.stream_unary("/loco.wire.v1.CoordinatorService/Push")
            header = pb.PushRequest(header=paris.header(0, BODY)).SerializeToString()
            block = pb.PushRequest(block=make_block(bytes(MAX_MESSAGE_BYTES))).SerializeToString()
            with pytest.raises(grpc.RpcError) as caught:
                push(iter([header, block]), timeout=10)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        paris.push(0, BODY)
        oslo.push(0, BODY)


def test_uploads_at_once_are_counted_with_what_they_declare(tmp_path: Path) -> None:
    """Nothing of them is on disk yet; together they could take more than the quota."""
    config = config_of(quorum={"min_sites": 2}, limits={"uploads_per_round": 1.5})
    most = 8 * LAYOUT.num_elements
    with (
        coordinating(create_store(tmp_path, config)) as coordinator,
        Member(coordinator, "paris") as paris,
        Member(coordinator, "oslo") as oslo,
    ):
        paris.enter()
        oslo.enter()
        go_on = threading.Event()

        def stands_still() -> Iterator[pb.PushRequest]:
            header = paris.header(0, b"", size_bytes=most, digest=b"a" * 16)
            yield pb.PushRequest(header=header)
            yield pb.PushRequest(block=make_block(b"x"))
            go_on.wait(20)

        first = paris.stub.Push.future(stands_still(), timeout=30)
        incoming = coordinator.store.directory / "incoming" / "0"
        eventually(lambda: incoming.exists() and list(incoming.iterdir()), "the first has begun")
        with pytest.raises(grpc.RpcError) as caught:
            paris.push(0, bytes(most))
        assert refusal(caught.value)[0] == "quota"
        oslo.push(0, BODY)  # an account of its own
        go_on.set()
        first.cancel()


@pytest.fixture
def tight(tmp_path: Path) -> Iterator[tuple[Coordinator, Member]]:
    """paris in round 0, which waits for oslo; a dense contribution takes half of its quota."""
    config = config_of(
        quorum={"min_sites": 2}, codec={"bits": 32}, limits={"uploads_per_round": 1.0}
    )
    with (
        coordinating(create_store(tmp_path, config)) as coordinator,
        Member(coordinator, "paris") as paris,
        Member(coordinator, "oslo") as oslo,
    ):
        paris.enter()
        oslo.enter()
        yield coordinator, paris


def dense(seed: int) -> bytes:
    return shard_body(vector(LAYOUT, seed), config_of(codec={"bits": 32}))


def test_an_upload_that_is_declared_smaller_again_is_counted_with_what_is_there(
    tight: tuple[Coordinator, Member],
) -> None:
    coordinator, paris = tight
    body, go_on = dense(1), threading.Event()
    with pytest.raises(grpc.RpcError):  # all but its last byte
        paris.send(paris.header(0, body), body[:-1])
    come = uploaded(coordinator)

    def stands_still() -> Iterator[pb.PushRequest]:
        yield pb.PushRequest(header=paris.header(0, body, size_bytes=1))
        go_on.wait(20)

    small = paris.stub.Push.future(stands_still(), timeout=30)
    eventually(lambda: uploaded(coordinator) > come, "its header has come")
    with pytest.raises(grpc.RpcError) as caught:
        paris.push(0, dense(2))
    assert refusal(caught.value)[0] == "quota"
    go_on.set()
    small.cancel()


def test_a_shard_whose_caller_did_not_wait_for_the_answer_is_counted(
    tight: tuple[Coordinator, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, paris = tight
    rename, checked, go_on = finish.rename, threading.Event(), threading.Event()

    def held(source: Path, target: Path) -> None:
        checked.set()
        assert go_on.wait(20)
        rename(source, target)

    monkeypatch.setattr(finish, "rename", held)
    body = dense(1)
    message = pb.PushRequest(header=paris.header(0, body), block=make_block(body))
    impatient = paris.stub.Push.future(iter([message]), timeout=20)
    assert checked.wait(20)
    impatient.cancel()
    go_on.set()
    stored = coordinator.store.directory / "contributions" / "0"
    eventually(lambda: stored.exists() and list(stored.iterdir()), "it has its name")
    time.sleep(0.5)  # until its stream has ended, which counts as well
    with pytest.raises(grpc.RpcError) as caught:
        paris.push(0, dense(2))
    assert refusal(caught.value)[0] == "quota"


def uploaded(coordinator: Coordinator) -> int:
    """Bytes of uploads that have come."""
    return coordinator.running.monitor.bytes["paris", "up", "contribution"]


def test_shards_of_lives_that_ended_are_counted(tmp_path: Path) -> None:
    """A site that joins again and again, each time with half of a contribution."""
    config = config_of(quorum={"min_sites": 2}, limits={"uploads_per_round": 1.0})
    half = shard_body(vector(LAYOUT, 1), config, rank=0, ranks=2)
    most = 8 * LAYOUT.num_elements // len(half) + 1
    with coordinating(create_store(tmp_path, config)) as coordinator:
        with Member(coordinator, "oslo") as oslo, Member(coordinator, "paris", ranks=2) as paris:
            oslo.enter()
            paris.enter()
            for life in range(most + 1):
                paris.join(instance=f"life {life}")
                try:
                    paris.push(0, half, shard=0)
                except grpc.RpcError as error:
                    assert refusal(error)[0] == "quota"  # noqa: PT017
                    break
            else:
                raise AssertionError("it went on for ever")
        stored = coordinator.store.directory / "contributions" / "0"
        assert sum(path.stat().st_size for path in stored.iterdir()) <= 8 * LAYOUT.num_elements + 64


# --- claims ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "inner_steps", "fits"),
    [
        (2 * 16 * 256, 2, True),
        (2 * 16 * 256 + 1, 2, False),
        (2**63, 2, False),
        (100, 0, False),
        (215 * 16 * 256, 215, True),
        (100, 216, False),  # max_local_steps = 200, and 15 of the round
        (2**63, 2**63, False),
    ],
)
def test_a_site_cannot_make_itself_heavier_than_its_steps(
    tmp_path: Path, tokens: int, inner_steps: int, fits: bool
) -> None:
    """data.batch = 16 sequences of model.seq_len = 256 tokens an inner step."""
    with (
        coordinating(create_store(tmp_path, CONFIG)) as coordinator,
        Member(coordinator, "paris") as paris,
        Member(coordinator, "oslo") as oslo,
    ):
        paris.enter()
        oslo.enter()
        if fits:
            paris.push(0, BODY, tokens=tokens, inner_steps=inner_steps)
            return
        with pytest.raises(grpc.RpcError) as caught:
            paris.push(0, BODY, tokens=tokens, inner_steps=inner_steps)
        reason, message = refusal(caught.value)
        assert reason == "shard"
        assert str(tokens) in message


@pytest.mark.parametrize(
    ("sections", "most"),
    [
        ({}, 16 * 256),
        ({"data": {"batch": 3}, "model": {"seq_len": 10}}, 30),
        ({"model": {"file": "mine.safetensors"}}, None),
        ({"model": {"hf": "some/model"}}, 16 * 256),
        ({"model": {"file": "mine.safetensors"}, "limits": {"tokens_per_step": 7}}, 7),
        ({"limits": {"tokens_per_step": 7}}, 7),
    ],
)
def test_the_bound_of_weights_follows_the_model(
    sections: dict[str, dict[str, object]], most: int | None
) -> None:
    assert upload.most_tokens_per_step(config_of(**sections)) == most


@pytest.mark.parametrize("num_bytes", [0, 15, 17, 5000])
def test_a_digest_of_another_length_is_refused_before_it_names_a_file(
    tmp_path: Path, num_bytes: int
) -> None:
    with (
        coordinating(create_store(tmp_path, CONFIG)) as coordinator,
        Member(coordinator, "paris") as paris,
    ):
        paris.enter()
        header = paris.header(0, BODY, digest=bytes(num_bytes))
        with pytest.raises(grpc.RpcError) as caught:
            paris.stub.PushOffset(pb.PushOffsetRequest(header=header), timeout=10)
        assert refusal(caught.value)[0] == "shard"
