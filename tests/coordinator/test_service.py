"""The service over real gRPC: rounds, downloads, bytes counted at both ends, standard services.

Compared with: the outer step applied by hand, the files of the state directory, and the counters
of the site's end. Run alone: pytest tests/coordinator/test_service.py
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry
from support.live import Coordinator, Member, coordinating, eventually, refusal
from support.runs import LAYOUT, config_of, create_store, digest_of, shard_body, vector

from coordinator.events import SiteJoined
from coordinator.store import Store
from loco.errors import ConfigError
from loco.metrics import DIRECTIONS, KINDS, Catalogue, WireMetrics
from loco.outer import apply_update
from loco.wire.blocks import make_block
from loco.wire.protocol import PROTOCOL_VERSION
from loco.wire.v1 import coordinator_pb2 as pb
from worker.session import Session

CONFIG = config_of(quorum={"min_sites": 2}, run={"rounds": 2}, inner={"steps": 7})
EMBED = {"tensors": ["embed.weight"], "k": 300, "bits": 1}
SERVICE = "loco.wire.v1.CoordinatorService"


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    with coordinating(create_store(tmp_path, CONFIG)) as running:
        yield running


@pytest.fixture
def sites(coordinator: Coordinator) -> Iterator[tuple[Member, Member]]:
    with Member(coordinator, "paris", ranks=2) as paris, Member(coordinator, "oslo") as oslo:
        paris.enter()
        oslo.enter()
        yield paris, oslo


def contribute(sites: tuple[Member, ...], round_: int) -> None:
    for seed, site in enumerate(sites):
        site.contribute(round_, vector(LAYOUT, 10 * round_ + seed, scale=1e-2))
    coordinator = sites[0].coordinator
    eventually(lambda: coordinator.state.round == round_ + 1, "the round is committed")


def test_sites_that_apply_the_update_hold_theta_of_the_coordinator(
    coordinator: Coordinator, sites: tuple[Member, Member]
) -> None:
    paris, oslo = sites
    first = coordinator.state.theta_digest
    theta = np.frombuffer(paris.snapshot(0, 0, 4 * LAYOUT.num_elements), "<f4").copy()
    assert digest_of(theta) == first
    for round_ in range(2):
        before = digest_of(theta)
        assert oslo.wait(round_, before, timeout=10).directive == pb.DIRECTIVE_TRAIN
        contribute(sites, round_)
        told = oslo.wait(round_, before)
        assert told.directive == pb.DIRECTIVE_UPDATE
        assert told.included
        apply_update(theta, paris.pull(round_, 0, told.update_bytes))
        assert digest_of(theta) == told.theta_digest == coordinator.state.theta_digest
    assert oslo.wait(2).directive == pb.DIRECTIVE_FINISHED
    assert digest_of(theta) != first


def test_the_plan_of_a_round_comes_with_the_order_to_train(
    coordinator: Coordinator, sites: tuple[Member, Member]
) -> None:
    contribute(sites, 0)
    plan = sites[1].wait(1, timeout=10).plan
    assert (plan.inner_steps, plan.first_step, plan.total_steps, plan.k) == (7, 7, 14, 64)


def test_sites_share_k_as_the_last_update_had_many(tmp_path: Path) -> None:
    """k = 60 for one site: two that open the run send 30 each, three in an update 20 from then on.

    What a site is told of a round in the past does not change, nor does a restart change anything.
    """
    config = config_of(
        quorum={"min_sites": 2, "grace_seconds": 3600.0},
        run={"rounds": 4},
        codec={"k": 60, "k_sites": 1},
    )
    with (
        coordinating(create_store(tmp_path, config)) as coordinator,
        Member(coordinator, "paris") as paris,
        Member(coordinator, "oslo") as oslo,
        Member(coordinator, "kyoto") as kyoto,
    ):
        paris.enter()
        oslo.enter()
        digests = [coordinator.state.theta_digest]
        assert paris.wait(0, digests[0], timeout=10).plan.k == 30
        kyoto.enter()
        contribute((paris, oslo), 0)
        digests.append(coordinator.state.theta_digest)
        assert kyoto.wait(0, digests[0]).directive == pb.DIRECTIVE_UPDATE
        for site in (paris, oslo, kyoto):
            assert site.wait(1, digests[1], timeout=10).plan.k == 30
        contribute((paris, oslo, kyoto), 1)
        digests.append(coordinator.state.theta_digest)
        assert oslo.wait(2, digests[2], timeout=10).plan.k == 20
        assert coordinator.metric("loco_values_per_chunk") == 20
    with coordinating(Store.open(tmp_path)) as again, Member(again, "paris") as paris:
        assert again.state.num_sites == 3
        paris.enter()
        told = paris.wait(1, digests[1])
        assert (told.directive, told.plan.k) == (pb.DIRECTIVE_UPDATE, 30)


@pytest.mark.parametrize(
    ("outer", "bits", "own_step"),
    [
        ({"alpha": 0.5}, 2, 0.5),
        ({"alpha": 0.5, "aggregation": "mean"}, 2, 0.25),
        ({"alpha": 0.5, "aggregation": "mean"}, 32, 0.0),
        (
            {"alpha_steps": {1: 9.0}, "own_fragments": {"e": EMBED | {"aggregation": "mean"}}},
            1,
            1.0,
        ),
    ],
)
def test_a_plan_tells_what_becomes_of_a_sites_own_values(
    tmp_path: Path, outer: dict[str, Any], bits: int, own_step: float
) -> None:
    """alpha, or a site's share of it; 0 of dense ones, whose update is not to be guessed."""
    config = config_of(outer=outer, codec={"bits": bits}, quorum={"min_sites": 2})
    with (
        coordinating(create_store(tmp_path, config)) as coordinator,
        Member(coordinator, "paris") as paris,
        Member(coordinator, "oslo") as oslo,
    ):
        paris.enter()
        oslo.enter()
        first = coordinator.state.theta_digest
        assert paris.wait(0, timeout=10).plan.own_step == own_step
        contribute((paris, oslo), 0)
        told = paris.wait(0, first)
        assert told.plan.own_step == own_step  # of the past: for a site that repeats it
        if "alpha_steps" in outer:
            assert told.next.own_step == 4.5


def test_a_fragment_with_rules_of_its_own_has_its_own_k_and_bits(tmp_path: Path) -> None:
    """Round 1 is its turn: an operator's k is for all others, other bits are refused."""
    config = config_of(
        outer={"own_fragments": {"embed": EMBED}}, run={"rounds": 3}, quorum={"min_sites": 1}
    )
    with (
        coordinating(create_store(tmp_path, config)) as coordinator,
        Member(coordinator, "paris") as paris,
    ):
        paris.enter()
        assert paris.wait(0, timeout=10).plan.k == 64
        contribute((paris,), 0)
        assert paris.wait(1, timeout=10).plan.k == 300
        with pytest.raises(grpc.RpcError) as caught:
            paris.contribute(1, vector(LAYOUT, 2))
        assert refusal(caught.value)[0] == "payload"
        assert "2-bit payload, this round has 1 bits" in refusal(caught.value)[1]
        one_bit = config_of(codec={"bits": 1})
        paris.push(1, shard_body(vector(LAYOUT, 2), one_bit))
        eventually(lambda: coordinator.state.round == 2, "the round is committed")
        assert paris.wait(2, timeout=10).plan.k == 64


def test_an_update_says_who_is_in_it(
    coordinator: Coordinator, sites: tuple[Member, Member]
) -> None:
    paris, _ = sites
    digest = coordinator.state.theta_digest
    with Member(coordinator, "kyoto") as kyoto:
        kyoto.enter()
        contribute(sites, 0)
        assert paris.wait(0, digest).included
        assert not kyoto.wait(0, digest).included


def test_a_wait_ends_when_there_is_something_to_do(
    coordinator: Coordinator, sites: tuple[Member, Member]
) -> None:
    """A long poll: the answer comes with the event, long before the time is over."""
    paris, oslo = sites
    paris.contribute(0, vector(LAYOUT, 1))
    request = pb.WaitRoundRequest(
        caller=paris.caller, theta_digest=coordinator.state.theta_digest, timeout_seconds=29
    )
    answer = paris.stub.WaitRound.future(request)
    oslo.contribute(0, vector(LAYOUT, 2))
    assert answer.result(timeout=20).directive == pb.DIRECTIVE_UPDATE


def test_a_site_whose_contribution_is_on_its_way_gets_the_update_and_no_order_to_train(
    coordinator: Coordinator, sites: tuple[Member, Member]
) -> None:
    paris, oslo = sites
    request = pb.WaitRoundRequest(
        caller=paris.caller, theta_digest=coordinator.state.theta_digest, timeout_seconds=0.1
    )
    assert paris.stub.WaitRound(request, timeout=20).directive == pb.DIRECTIVE_TRAIN
    request.contributing = True
    assert paris.stub.WaitRound(request, timeout=20).directive == pb.DIRECTIVE_WAIT
    request.timeout_seconds = 29
    answer = paris.stub.WaitRound.future(request)
    paris.contribute(0, vector(LAYOUT, 1))
    oslo.contribute(0, vector(LAYOUT, 2))
    told = answer.result(timeout=20)
    assert (told.directive, told.included) == (pb.DIRECTIVE_UPDATE, True)


def test_a_wait_says_what_for(coordinator: Coordinator, sites: tuple[Member, Member]) -> None:
    paris, _ = sites
    paris.contribute(0, vector(LAYOUT, 1))
    answer = paris.wait(0)
    assert answer.directive == pb.DIRECTIVE_WAIT
    assert answer.message == "round 0 waits for the contribution of oslo"


def test_a_wrong_theta_is_told_to_start_from_the_snapshot(
    coordinator: Coordinator, sites: tuple[Member, Member]
) -> None:
    answer = sites[0].wait(0, "0" * 64)
    assert answer.directive == pb.DIRECTIVE_RESYNC
    assert answer.snapshot_round == 0
    assert answer.theta_digest == coordinator.state.theta_digest
    assert coordinator.metric("loco_digest_mismatches_total", site="paris") == 1


# --- downloads ----------------------------------------------------------------------------------


@pytest.mark.parametrize("behind", [1, 2])
def test_a_damaged_update_is_named_and_made_up_for_by_a_snapshot(
    tmp_path: Path, behind: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the newest round, which nobody has asked for yet, and of one before it."""
    state = {"snapshot_every_rounds": 50, "keep_updates": 60}
    with (
        coordinating(
            create_store(tmp_path, config_of(quorum={"min_sites": 1}, state=state))
        ) as running,
        Member(running, "paris") as paris,
    ):
        paris.enter()
        for round_ in range(2):
            eventually(lambda: running.state.phase == "open", "the round is open")
            paris.contribute(round_, vector(LAYOUT, round_))
            eventually(lambda: running.state.round == round_ + 1, "it is committed")  # noqa: B023
        damaged = tmp_path / "updates" / str(2 - behind)
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
        answer = paris.wait(2 - behind, running.state.digests[2 - behind])
        assert answer.directive == pb.DIRECTIVE_RESYNC
        assert f"update of round {2 - behind} is damaged" in answer.message
        assert (answer.snapshot_round, answer.theta_digest) == (2, running.state.theta_digest)
        assert paris.wait(2).directive == pb.DIRECTIVE_TRAIN
        assert running.metric("loco_digest_mismatches_total", site="paris") == 0
    assert f"{damaged} has not the digest" in caplog.text


def test_ranges_of_an_update_join_to_the_whole(
    coordinator: Coordinator, sites: tuple[Member, Member]
) -> None:
    contribute(sites, 0)
    path = coordinator.store.update(0)
    whole = path.read_bytes()
    for parts in (1, 2, 3, 7):
        cuts = [len(whole) * i // parts for i in range(parts + 1)]
        pulled = [sites[0].pull(0, a, b - a) for a, b in itertools.pairwise(cuts)]
        assert b"".join(pulled) == whole
    assert sites[0].pull(0, len(whole), 0) == b""


@pytest.mark.parametrize(("kind", "round_"), [("update", 0), ("snapshot", 0)])
def test_a_range_outside_the_file_names_its_size(
    coordinator: Coordinator, sites: tuple[Member, Member], kind: str, round_: int
) -> None:
    contribute(sites, 0)
    store = coordinator.store
    path = store.update(0) if kind == "update" else store.directory / "snapshots" / "0" / "theta"
    size = path.stat().st_size
    ask = sites[0].pull if kind == "update" else sites[0].snapshot
    for offset, length in ((0, size + 1), (size, 1), (1 << 62, 1)):
        with pytest.raises(grpc.RpcError) as caught:
            ask(round_, offset, length)
        reason, message = refusal(caught.value)
        assert reason == "not_available"
        assert f"the {kind} of round 0 has {size}" in message


def test_a_snapshot_that_is_not_there_is_named(sites: tuple[Member, Member]) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        sites[0].snapshot(9, 0, 4)
    assert refusal(caught.value) == ("not_available", "no snapshot of round 9")


def test_only_members_download(coordinator: Coordinator, sites: tuple[Member, Member]) -> None:
    with Member(coordinator, "stranger") as stranger:
        for ask in (stranger.pull, stranger.snapshot):
            with pytest.raises(grpc.RpcError) as caught:
                ask(0, 0, 4)
            assert refusal(caught.value)[0] == "unknown_site"


def test_a_message_above_the_ceiling_ends_its_call_and_nothing_else(
    sites: tuple[Member, Member],
) -> None:
    paris, _ = sites
    header = pb.PushRequest(header=paris.header(0, b"x" * 100))
    block = pb.PushRequest(block=make_block(b"x" * (3 << 20)))
    with pytest.raises(grpc.RpcError) as caught:
        paris.stub.Push(iter([header, block]))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert paris.beat().round == 0


# --- bytes --------------------------------------------------------------------------------------


def counted(registry: CollectorRegistry, site: str) -> dict[tuple[str, str], float]:
    return {
        (direction, kind): registry.get_sample_value(
            "loco_wire_bytes_total", {"site": site, "direction": direction, "kind": kind}
        )
        or 0.0
        for direction in DIRECTIONS
        for kind in KINDS
    }


def test_both_ends_count_the_same_bytes(coordinator: Coordinator) -> None:
    """A site's own session against the coordinator, kind by kind; GetRun precedes membership."""
    mine = CollectorRegistry()
    session = Session(coordinator.address, "paris", 10.0, WireMetrics(Catalogue(mine)))
    with Member(coordinator, "oslo") as oslo:
        oslo.enter()
        run = session.get_run()
        asked = counted(mine, "paris")
        joined = session.join(run, LAYOUT, 1, None)
        session.caller = pb.Caller(run_id=run.run_id, site="paris", incarnation=joined.incarnation)
        digest = coordinator.state.theta_digest
        session.snapshot(0, range(4 * LAYOUT.num_elements))
        assert session.next_directive(0, digest).directive == pb.DIRECTIVE_TRAIN
        body = shard_body(vector(LAYOUT, 1), CONFIG)
        header = pb.PushHeader(num_shards=1, tokens=5, inner_steps=7, theta_digest=digest)
        session.push(header, body)
        oslo.contribute(0, vector(LAYOUT, 2))
        update = session.next_directive(0, digest)
        assert session.pull(0, range(update.update_bytes)) == update.update.data
        session.close()
    theirs = counted(coordinator.running.monitor.registry, "paris")
    own = {key: value - asked[key] for key, value in counted(mine, "paris").items()}
    assert own == theirs
    assert len(body) < own["up", "contribution"] < len(body) + 500
    twice = 2 * update.update_bytes  # along with the directive, and pulled
    assert twice < own["down", "update"] < twice + 100
    assert 4 * LAYOUT.num_elements < own["down", "snapshot"]


# --- standard services and status ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["", SERVICE])
def test_health_says_serving(coordinator: Coordinator, name: str) -> None:
    with grpc.insecure_channel(coordinator.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_lists_the_services(coordinator: Coordinator) -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    with grpc.insecure_channel(coordinator.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        answer = next(iter(stub.ServerReflectionInfo(iter([request]), timeout=10)))
    names = {service.name for service in answer.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names


def test_status_of_another_protocol_version_is_refused(coordinator: Coordinator) -> None:
    with Member(coordinator, "reader") as reader, pytest.raises(grpc.RpcError) as caught:
        reader.stub.Status(pb.StatusRequest(protocol_version=PROTOCOL_VERSION + 1))
    assert refusal(caught.value)[0] == "protocol_version"


def test_a_second_coordinator_on_the_port_does_not_start(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    second = create_store(tmp_path / "second", CONFIG)
    with pytest.raises(ConfigError, match=f"cannot listen on {coordinator.address}"):
        Coordinator(second, listen=coordinator.address)
    with Member(coordinator, "paris") as paris:
        assert paris.join().incarnation == 1


def test_a_state_directory_in_use_is_refused_by_name(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path} is in use by another coordinator"):
        Store.open(tmp_path)
    with pytest.raises(ConfigError, match="is in use by another coordinator"):
        create_store(tmp_path, CONFIG)


def test_many_sites_at_once(tmp_path: Path) -> None:
    """Concurrent joins, waits and pushes from threads: every site counts, once."""
    config = config_of(quorum={"min_sites": 8}, run={"rounds": 1})
    with coordinating(create_store(tmp_path, config)) as coordinator:
        members = [Member(coordinator, f"site-{i}") for i in range(8)]

        def live(member: Member, seed: int) -> None:
            member.enter()
            digest = coordinator.state.digests[0]
            eventually(
                lambda: member.wait(0, digest, timeout=5).directive == pb.DIRECTIVE_TRAIN, "open"
            )
            member.contribute(0, vector(LAYOUT, seed))

        threads = [
            threading.Thread(target=live, args=(member, seed))
            for seed, member in enumerate(members)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        eventually(lambda: coordinator.state.round == 1, "the round is committed")
        assert sorted(coordinator.state.updates[0].included) == [f"site-{i}" for i in range(8)]
        for member in members:
            member.channel.close()


def test_a_site_whose_heartbeats_return_is_expected_again(tmp_path: Path) -> None:
    """In the open round that waited for it before, without a word from anything but its pulse."""
    quorum = {"min_sites": 2, "heartbeat_seconds": 0.3, "dead_after_seconds": 1.0}
    with (
        coordinating(create_store(tmp_path, config_of(quorum=quorum))) as coordinator,
        Member(coordinator, "paris") as paris,
        Member(coordinator, "oslo") as oslo,
    ):
        paris.enter()
        oslo.enter()
        assert coordinator.state.expected == ("oslo", "paris")

        def paris_is_lost() -> bool:
            oslo.beat()
            return bool(coordinator.state.sites["paris"].status == "lost")

        eventually(paris_is_lost, "paris is lost")
        assert coordinator.state.expected == ("oslo",)
        paris.beat()
        assert coordinator.state.sites["paris"].status == "ready"
        assert coordinator.state.expected == ("oslo", "paris")
        assert coordinator.metric("loco_site_alive", site="paris") == 1
        status = coordinator.running.monitor.status(coordinator.state)
        assert status["sites_alive"] == 2
        assert status["notes"][0]["message"] == "site paris is heard of again"


def test_of_two_that_join_as_one_site_in_the_same_moment_one_is_told(tmp_path: Path) -> None:
    """Else both would have the same incarnation, and contribute as one."""
    with (
        coordinating(create_store(tmp_path, config_of(quorum={"min_sites": 1}))) as coordinator,
        Member(coordinator, "paris") as one,
        Member(coordinator, "paris") as other,
        ThreadPoolExecutor() as threads,
    ):
        engine, loop = coordinator.running.engine, coordinator._loop
        asyncio.run_coroutine_threadsafe(engine._turn.acquire(), loop).result()
        joining = [
            threads.submit(member.join, instance=name)
            for member, name in ((one, "a"), (other, "b"))
        ]
        eventually(
            lambda: sum(isinstance(a.event, SiteJoined) for a in engine._asked) == 2, "both ask"
        )
        loop.call_soon_threadsafe(engine._turn.release)
        answers = [done.exception() or done.result().incarnation for done in joining]
        assert sorted(answer for answer in answers if isinstance(answer, int)) == [2]
        (refused,) = (answer for answer in answers if not isinstance(answer, int))
        assert "has joined just now" in str(refused)
