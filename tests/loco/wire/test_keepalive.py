"""A long wait is not thrown out: keepalive pings of a site against what the coordinator allows.

The shipped options with all times divided by 30, so that six pings take six seconds. Compared with:
a coordinator with the shipped times, whose site pings 30 times as often as it allows and is thrown
out (field reports: a client that was, during long waits). gRPC sends no two pings within a second.
Run alone: pytest tests/loco/wire/test_keepalive.py
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import grpc
import pytest
from support.live import Member, coordinating, eventually
from support.runs import config_of, create_store

from coordinator import server
from loco.wire.protocol import CHANNEL_OPTIONS, SERVER_OPTIONS
from loco.wire.v1 import coordinator_pb2 as pb
from loco.wire.v1 import coordinator_pb2_grpc as pb_grpc

FASTER = 30
WAIT_SECONDS = 6.0
Options = tuple[tuple[str, int], ...]


def scaled(options: Options, by: int) -> Options:
    """The options with shorter pauses between pings."""
    return tuple(
        (name, value // by if name.endswith(("time_ms", "without_data_ms")) else value)
        for name, value in options
    )


def waited(directory: Path, options: Options) -> tuple[grpc.StatusCode, list[str]]:
    """What becomes of a site that waits for others, and of its connection."""
    states: list[str] = []
    store = create_store(directory, config_of(quorum={"min_sites": 2}))
    with coordinating(store) as coordinator, Member(coordinator, "paris") as paris:
        paris.join()
        connection = grpc.insecure_channel(coordinator.address, options=options)
        connection.subscribe(lambda state: states.append(state.name), try_to_connect=True)
        eventually(lambda: "READY" in states, "the connection")
        request = pb.WaitRoundRequest(
            caller=paris.caller,
            theta_digest=coordinator.state.theta_digest,
            timeout_seconds=WAIT_SECONDS,
        )
        call = pb_grpc.CoordinatorServiceStub(connection).WaitRound.future(request, timeout=30)
        ended = threading.Event()
        call.add_done_callback(lambda _: ended.set())
        assert ended.wait(20)
        time.sleep(0.1)  # a goodbye that came with the answer
        seen = states[states.index("READY") :]
        code = call.code()
        connection.close()
    return code, seen


def test_a_site_that_waits_long_keeps_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SERVER_OPTIONS", scaled(SERVER_OPTIONS, FASTER))
    code, states = waited(tmp_path, scaled(CHANNEL_OPTIONS, FASTER))
    assert code == grpc.StatusCode.OK
    assert states == ["READY"]


def test_one_that_pings_more_often_than_is_allowed_does_not(tmp_path: Path) -> None:
    code, states = waited(tmp_path, scaled(CHANNEL_OPTIONS, FASTER))
    assert code == grpc.StatusCode.UNAVAILABLE
    assert states != ["READY"]
