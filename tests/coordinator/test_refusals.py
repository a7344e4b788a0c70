"""Every refusal of the wire, provoked over real mutual TLS; each names the thing that was wrong.

Compared with: the enum of the proto, so that a new reason without a case fails here. Run alone:
pytest tests/coordinator/test_refusals.py
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from support.certs import Certs, channel
from support.live import Coordinator, Member, coordinating, eventually, refusal
from support.runs import LAYOUT, config_of, create_store, shard_body, vector

from coordinator import finish, upload
from loco.layout import Layout, Parameter
from loco.wire.blocks import make_block
from loco.wire.protocol import PROTOCOL_VERSION
from loco.wire.v1 import coordinator_pb2 as pb
from loco.wire.v1 import coordinator_pb2_grpc as pb_grpc

CONFIG = config_of(
    quorum={"min_sites": 2, "grace_seconds": 0.2, "quarantine_after": 1},
    outer={"max_value": 50.0},
    limits={"requests_per_second": 20.0, "calls_at_once": 8, "uploads_per_round": 1.0},
)
BODY = shard_body(vector(LAYOUT, 1), CONFIG)
Case = Callable[[Member, Member], object]
CASES: dict[str, tuple[Case, str]] = {}


@pytest.fixture
def coordinator(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Coordinator]:
    """Names that no certificate can hold are refused as such in plaintext only."""
    case_ = getattr(request.node, "callspec", None)
    odd_name = case_ is not None and "site_name" in case_.params.values()
    certs = None if odd_name else Certs(tmp_path / "certs")
    with coordinating(create_store(tmp_path / "state", CONFIG), certs) as running:
        yield running


@pytest.fixture
def sites(coordinator: Coordinator) -> Iterator[tuple[Member, Member]]:
    """paris and oslo, in the open round 0."""
    with Member(coordinator, "paris") as paris, Member(coordinator, "oslo") as oslo:
        paris.enter()
        oslo.enter()
        yield paris, oslo


def case(reason: str, named: str) -> Callable[[Case], Case]:
    """Register what provokes `reason`; the message must contain `named`."""

    def register(provoke: Case) -> Case:
        CASES[reason] = (provoke, named)
        return provoke

    return register


@case("protocol_version", f"version 99, this coordinator {PROTOCOL_VERSION}")
def _(paris: Member, oslo: Member) -> None:
    paris.join(protocol_version=99)


@case("run_id", "run 'other', this coordinator serves 'test-run'")
def _(paris: Member, oslo: Member) -> None:
    paris.caller.run_id = "other"
    paris.push(0, BODY)


@case("config_hash", "site 'paris' has config 'abc'")
def _(paris: Member, oslo: Member) -> None:
    paris.join(config_hash="abc")


@case("layout", "site 'paris' has block.weight [4096, 3], the run has block.weight [3, 4096]")
def _(paris: Member, oslo: Member) -> None:
    shapes = [(p.name, p.shape) for p in LAYOUT.parameters]
    shapes[1] = (shapes[1][0], (4096, 3))
    paris.join(layout=Layout.of(shapes))


@case("site_name", "'Köln/1' is not allowed: use 1 to 32 of a-z, 0-9")
def _(paris: Member, oslo: Member) -> None:
    paris.join(site="Köln/1")


@case("ahead", "'paris' holds round 7, this coordinator is at round 0")
def _(paris: Member, oslo: Member) -> None:
    paris.wait(7, "whatever")


@case("superseded", "'paris' was joined again by another process (incarnation 2)")
def _(paris: Member, oslo: Member) -> None:
    with Member(paris.coordinator, "paris") as newer:
        newer.join()
    paris.beat()


@case("unknown_site", "'paris' (incarnation 1) is not a member of this run")
def _(paris: Member, oslo: Member) -> None:
    paris.stub.Leave(pb.LeaveRequest(caller=paris.caller, reason="done"))
    paris.wait(0)


def finish_round(paris: Member, oslo: Member) -> None:
    paris.push(0, BODY)
    oslo.push(0, BODY)
    eventually(lambda: paris.coordinator.state.round == 1, "round 0 is committed")


@case("stale_round", "round 0 is closed (the run is at round 1)")
def _(paris: Member, oslo: Member) -> None:
    finish_round(paris, oslo)
    with Member(paris.coordinator, "kyoto") as kyoto:
        kyoto.join()
        kyoto.push(0, BODY)


@case("not_expected", "round 3 is not open: the run is at round 0, open")
def _(paris: Member, oslo: Member) -> None:
    paris.push(3, BODY)


@case("shard", "shard 1 of 2, fragment 0: site 'paris' joined with 1 shards")
def _(paris: Member, oslo: Member) -> None:
    paris.push(0, BODY, shard=1, num_shards=2)


@case("corrupt", "shard 0 of 'paris'")
def _(paris: Member, oslo: Member) -> None:
    paris.send(paris.header(0, BODY), BODY[:-1] + b"?")


@case("payload", "shard 0 of 'paris' is malformed: truncated")
def _(paris: Member, oslo: Member) -> None:
    paris.push(0, BODY[:-1])


@case("digest", "'paris' measures from theta abcd")
def _(paris: Member, oslo: Member) -> None:
    paris.push(0, BODY, theta_digest="abcd")


@case("not_available", "no update of round 5")
def _(paris: Member, oslo: Member) -> None:
    paris.pull(5, 0, 1)


@case("conflict", "shard 0 of 'paris' for round 0 was accepted before with other bytes")
def _(paris: Member, oslo: Member) -> None:
    paris.push(0, BODY)
    paris.push(0, shard_body(vector(LAYOUT, 2), CONFIG))


@case("disk_full", "disk is full: nothing is lost")
def _(paris: Member, oslo: Member) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:  # the disk is the fault that is injected
        patch.setattr(finish, "write_at", full)
        paris.push(0, BODY)


@case("absurd", "'paris' has 1008 in block.weight; outer.max_value allows 50")
def _(paris: Member, oslo: Member) -> None:
    a = vector(LAYOUT, 1)
    a[LAYOUT.parameters[1].start + 4100] = -1000.0
    paris.push(0, shard_body(a, config_of(codec={"k": 1})))


@case("quarantined", "site 'paris' is quarantined: 1 of its contributions were refused")
def _(paris: Member, oslo: Member) -> None:
    with pytest.raises(grpc.RpcError):
        paris.push(0, b"rubbish")
    paris.push(0, BODY)


def control(member: Member, **fields: object) -> None:
    with member.coordinator.channel("ops", "operator") as channel:
        request = pb.ControlRequest(protocol_version=PROTOCOL_VERSION, **fields)
        pb_grpc.CoordinatorServiceStub(channel).Control(request, timeout=10)


@case("evicted", "site 'paris' is evicted: an operator evicted it")
def _(paris: Member, oslo: Member) -> None:
    control(oslo, verb=pb.CONTROL_VERB_EVICT, site="paris")
    paris.push(0, BODY)


@case("control", "'data.batch' cannot be changed while the run goes on")
def _(paris: Member, oslo: Member) -> None:
    control(paris, verb=pb.CONTROL_VERB_SET, key="data.batch", value="3")


# --- who calls, and how much ----------------------------------------------------------------------


@case("role", "site 'paris' may not call Control: that is for operator")
def _(paris: Member, oslo: Member) -> None:
    request = pb.ControlRequest(protocol_version=PROTOCOL_VERSION, verb=pb.CONTROL_VERB_PAUSE)
    paris.stub.Control(request, timeout=10)


@case("identity", "site 'paris' speaks for site 'oslo': a certificate acts for its own site only")
def _(paris: Member, oslo: Member) -> None:
    paris.caller.CopyFrom(oslo.caller)
    paris.push(0, BODY)


@case("malformed", "site 'paris' sent 3 bytes to Heartbeat that are not its request")
def _(paris: Member, oslo: Member) -> None:
    paris.channel.unary_unary("/loco.wire.v1.CoordinatorService/Heartbeat")(b"\xff" * 3)


@case("revoked", "the certificate of site 'paris' (serial")
def _(paris: Member, oslo: Member) -> None:
    assert paris.coordinator.certs is not None
    paris.beat()
    paris.coordinator.certs.authority.revoke("paris")
    time.sleep(1.2)  # the coordinator looks once a second
    paris.beat()


@case("expired", "the certificate of site 'paris' was valid until")
def _(paris: Member, oslo: Member) -> None:
    assert paris.coordinator.certs is not None
    soon = paris.coordinator.certs.odd("paris", end=timedelta(seconds=3))
    with channel(paris.coordinator.address, soon) as connection:
        stub = pb_grpc.CoordinatorServiceStub(connection)
        stub.Heartbeat(pb.HeartbeatRequest(caller=paris.caller), timeout=10)
        time.sleep(3.1)
        stub.Heartbeat(pb.HeartbeatRequest(caller=paris.caller), timeout=10)


@case("rate", "site 'paris' makes more than 20 requests a second")
def _(paris: Member, oslo: Member) -> None:
    for _ in range(1000):  # faster than 20 a second, whatever else the machine does
        paris.beat()


@case("too_many_calls", "site 'paris' has 8 calls in progress")
def _(paris: Member, oslo: Member) -> None:
    paris.push(0, BODY)
    request = pb.WaitRoundRequest(
        caller=paris.caller,
        have_round=0,
        theta_digest=paris.coordinator.state.theta_digest,
        timeout_seconds=30.0,
    )
    with paris.coordinator.channel("paris") as other:  # one connection alone would queue them
        stubs = (paris.stub, pb_grpc.CoordinatorServiceStub(other))
        waiting = [stubs[i % 2].WaitRound.future(request) for i in range(9)]
        try:
            done = eventually(lambda: [call for call in waiting if call.done()], "one is refused")
            done[0].result()
        finally:
            for call in waiting:
                call.cancel()


@case("quota", "limits.uploads_per_round = 1 allows")
def _(paris: Member, oslo: Member) -> None:
    most = 8 * LAYOUT.num_elements
    half = os.urandom(most // 2)
    with pytest.raises(grpc.RpcError):  # begun, and left
        paris.send(paris.header(0, half, size_bytes=most), half)
    other = os.urandom(most)
    paris.push(0, other)


@case("slow", "limits.upload_bytes_per_second asks for 1024 a second")
def _(paris: Member, oslo: Member) -> None:
    def drops() -> Iterator[pb.PushRequest]:
        yield pb.PushRequest(header=paris.header(0, BODY))
        for byte in BODY[:100]:
            time.sleep(0.05)
            yield pb.PushRequest(block=make_block(bytes([byte])))

    with pytest.MonkeyPatch.context() as patch:  # a minute is long
        patch.setattr(upload, "SLOW_AFTER_SECONDS", 0.2)
        paris.stub.Push(drops(), timeout=30)


REASONS = [name.removeprefix("REFUSAL_REASON_").lower() for name in pb.RefusalReason.keys()[1:]]


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_is_given_and_names_what_was_wrong(
    coordinator: Coordinator, sites: tuple[Member, Member], reason: str
) -> None:
    assert reason in CASES, f"add a case that provokes {reason}"
    provoke, named = CASES[reason]
    with pytest.raises(grpc.RpcError) as caught:
        provoke(*sites)
    found, message = refusal(caught.value)
    assert found == reason
    assert named in message
    assert "\n" not in message
    assert coordinator.metric("loco_rejections_total", reason=reason) >= 1


def test_no_case_is_of_a_reason_that_does_not_exist() -> None:
    assert set(CASES) == set(REASONS)


CONTRIBUTING = ("conflict", "stale_round", "too_many_calls")  # their cases contribute first


@pytest.mark.parametrize("reason", [r for r in REASONS if r not in CONTRIBUTING])
def test_a_refused_request_leaves_the_round_as_it_was(
    coordinator: Coordinator, sites: tuple[Member, Member], reason: str
) -> None:
    """The other site's contribution, and the round, survive whatever one site does."""
    paris, oslo = sites
    oslo.push(0, BODY)
    with pytest.raises(grpc.RpcError):
        CASES[reason][0](paris, oslo)
    state = coordinator.state
    assert (state.round, state.phase, state.complete) == (0, "open", ("oslo",))


# --- the rest of a join's checks ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason", "named"),
    [
        ({"run_id": "x"}, "run_id", "run 'x'"),
        ({"num_shards": 0}, "shard", "has 0 shards"),
        ({"num_shards": 99}, "shard", "can be sharded over 1 to"),
        ({"have_round": 3}, "ahead", "holds round 3, this coordinator is at round 0"),
        ({"layout_fingerprint": "f00"}, "layout", "fingerprint 'f00'"),
        ({"layout": []}, "layout", ""),
        ({"site": ""}, "site_name", "''"),
        ({"site": "../etc"}, "site_name", "'../etc'"),
        ({"instance": "x" * 65}, "malformed", "65 letters: use at most 64"),
    ],
)
def test_a_wrong_join_is_refused(
    coordinator: Coordinator, changes: dict[str, object], reason: str, named: str
) -> None:
    if "layout" in changes:
        changes["layout_fingerprint"] = Layout.of([]).fingerprint
    with Member(coordinator, "kyoto") as kyoto:
        with pytest.raises(grpc.RpcError) as caught:
            kyoto.join(**changes)
        found, message = refusal(caught.value)
    assert found == reason
    assert named in message
    assert "kyoto" not in coordinator.state.sites


def test_a_site_that_joins_again_and_again_is_soon_told_to_wait(coordinator: Coordinator) -> None:
    """Each time is journaled and wakes all sites that wait: it counts as 20 of 100 requests."""

    def join_often(kyoto: Member) -> None:
        for life in range(50):
            kyoto.join(instance=f"life {life}")

    with Member(coordinator, "kyoto") as kyoto, pytest.raises(grpc.RpcError) as caught:
        join_often(kyoto)
    assert refusal(caught.value)[0] == "rate"


def test_a_layout_that_lacks_a_tensor_names_it(coordinator: Coordinator) -> None:
    shapes = [(p.name, p.shape) for p in LAYOUT.parameters]
    with Member(coordinator, "kyoto") as kyoto, pytest.raises(grpc.RpcError) as caught:
        kyoto.join(layout=Layout.of(shapes[:-1]))
    assert "only the run has scale []" in refusal(caught.value)[1]


def test_a_layout_that_nobody_means_is_not_multiplied_out(coordinator: Coordinator) -> None:
    """Its sizes are products: without a bound this one took minutes of the event loop."""
    endless = Parameter(name="a", shape=(2**62,) * 200_000, first_chunk=0)
    began = time.monotonic()
    with Member(coordinator, "kyoto") as kyoto, pytest.raises(grpc.RpcError) as caught:
        kyoto.join(layout=Layout((endless,)))
    assert refusal(caught.value)[0] == "layout"
    assert time.monotonic() - began < 10.0


def test_get_run_for_another_run_names_both(coordinator: Coordinator) -> None:
    with Member(coordinator, "kyoto") as kyoto, pytest.raises(grpc.RpcError) as caught:
        kyoto.stub.GetRun(pb.GetRunRequest(protocol_version=PROTOCOL_VERSION, run_id="mine"))
    reason, message = refusal(caught.value)
    assert reason == "run_id"
    assert "'mine'" in message
    assert "'test-run'" in message


def caller_in(request: Any) -> pb.Caller | None:
    """Who calls, wherever a request says it."""
    fields = request.DESCRIPTOR.fields_by_name
    if "header" in fields:
        return caller_in(request.header)
    return request.caller if "caller" in fields else None


def test_every_request_of_a_member_says_for_which_run_it_is(
    sites: tuple[Member, Member],
) -> None:
    """Two runs whose sites have equal names never share a round: both runs are named."""
    paris, asked = sites[0], []
    paris.caller.run_id = "theirs"
    for method in pb.DESCRIPTOR.services_by_name["CoordinatorService"].methods:
        request = GetMessageClass(method.input_type)()
        caller = caller_in(request)
        if caller is None:
            continue
        caller.CopyFrom(paris.caller)
        call = paris.channel.stream_stream(  # the wire does not know the difference
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=type(request).SerializeToString,
        )
        with pytest.raises(grpc.RpcError) as caught:
            list(call(iter([request]), timeout=10))
        assert refusal(caught.value)[0] == "run_id", method.name
        assert "run 'theirs', this coordinator serves 'test-run'" in refusal(caught.value)[1]
        asked.append(method.name)
    assert asked == [
        "Heartbeat", "Push", "PushOffset", "WaitRound", "Pull", "Snapshot", "Leave",
    ]  # fmt: skip
    assert paris.coordinator.state.sites["paris"].status == "ready"


def test_strangers_and_refused_sites_get_no_series_of_their_own(coordinator: Coordinator) -> None:
    """Names that anybody may send must not grow the metrics page."""
    for i in range(5):
        with Member(coordinator, f"stranger-{i}") as stranger, pytest.raises(grpc.RpcError):
            stranger.beat()
    samples = [
        sample.labels["site"]
        for family in coordinator.running.monitor.registry.collect()
        for sample in family.samples
        if "site" in sample.labels
    ]
    assert not [site for site in samples if site.startswith("stranger")]
