"""Operators' orders: journaled, in force at the round boundary on all sites, shown in the status.

Compared with: the plans that sites are given, the journal, and what a restarted coordinator knows.
Run alone: pytest tests/integration/test_control.py
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.live import Coordinator, Member, coordinating, eventually
from support.runs import LAYOUT, config_of, create_store, vector

from coordinator.events import SettingChanged
from coordinator.reducer import Reduced
from coordinator.state import State
from coordinator.store import Store
from loco.control import control
from loco.errors import RefusedError
from loco.status import StatusClient
from loco.wire.v1 import coordinator_pb2 as pb

CONFIG = config_of(
    quorum={"min_sites": 2, "grace_seconds": 600.0},
    run={"rounds": 20},
    inner={"steps": 3},
    state={"snapshot_every_rounds": 10, "keep_updates": 10},
)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    with coordinating(create_store(tmp_path, CONFIG)) as running:
        yield running


@pytest.fixture
def sites(coordinator: Coordinator) -> Iterator[tuple[Member, Member]]:
    with Member(coordinator, "paris") as paris, Member(coordinator, "oslo") as oslo:
        yield paris.enter(), oslo.enter()


def finish_round(coordinator: Coordinator, sites: tuple[Member, ...]) -> None:
    eventually(lambda: coordinator.state.phase == "open", "the round is open")
    round_ = coordinator.state.round
    for seed, site in enumerate(sites):
        site.contribute(round_, vector(LAYOUT, seed))
    eventually(lambda: coordinator.state.round == round_ + 1, "the round is committed")


def order(coordinator: Coordinator, verb: str, argument: str | None = None) -> str:
    return control(coordinator.address, verb, argument)


def status(coordinator: Coordinator) -> dict[str, object]:
    return dict(coordinator.running.monitor.status(coordinator.state))


@pytest.mark.parametrize(
    ("key", "value", "field"), [("inner.steps", "7", "inner_steps"), ("codec.k", "128", "k")]
)
def test_a_setting_holds_from_the_next_round_on_all_sites(
    key: str, value: str, field: str, coordinator: Coordinator, sites: tuple[Member, Member]
) -> None:
    before = [getattr(site.wait(0).plan, field) for site in sites]
    assert "from round 1 on" in order(coordinator, "set", f"{key}={value}")
    assert [getattr(site.wait(0).plan, field) for site in sites] == before
    finish_round(coordinator, sites)
    answers = [site.wait(1, timeout=10.0) for site in sites]
    assert [answer.directive for answer in answers] == [pb.DIRECTIVE_TRAIN] * 2
    assert [getattr(answer.plan, field) for answer in answers] == [int(value)] * 2
    journal = [event for _, event in coordinator.store.journal.replay(after=0)]
    assert SettingChanged(key=key, value=float(value)) in journal


def test_alpha_scales_the_update_from_the_next_round_on(tmp_path: Path) -> None:
    """Dense, mean, one site: theta moves by alpha times the contribution, exactly."""
    config = config_of(codec={"bits": 32}, outer={"aggregation": "mean"}, quorum={"min_sites": 1})
    with (
        coordinating(create_store(tmp_path, config)) as coordinator,
        Member(coordinator, "paris") as paris,
    ):
        paris.enter()
        reducer = coordinator.running.engine._reducer
        assert reducer is not None
        order(coordinator, "set", "outer.alpha=0.5")
        moved = []
        for _ in range(2):
            before = reducer.theta.copy()
            finish_round(coordinator, (paris,))
            moved.append(before - reducer.theta)
        ratio = abs(moved[1]).sum() / abs(moved[0]).sum()
        assert ratio == pytest.approx(0.5, rel=1e-4)


def test_settings_and_holds_survive_a_restart(tmp_path: Path) -> None:
    first = Coordinator(create_store(tmp_path, CONFIG))
    address = first.address
    order(first, "set", "inner.steps=7")
    order(first, "pause")
    first.stop()
    again = Coordinator(Store.open(tmp_path), listen=address)
    try:
        assert again.state.next_settings == {"inner.steps": 7.0}
        assert status(again)["hold"] == "paused"
    finally:
        again.stop()


def test_the_status_says_what_holds_who_ordered_it_and_what_is_to_come(
    tmp_path: Path,
) -> None:
    """As `loco status --json` gives it, over the wire, round by round."""
    config = config_of(
        quorum={"min_sites": 1},
        run={"rounds": 20},
        inner={"steps": 3},
        outer={"alpha": 1.0, "alpha_steps": {2: 0.7}},
        codec={"k": 64, "k_start": 256, "k_ramp_rounds": 2},
    )
    with (
        coordinating(create_store(tmp_path, config)) as coordinator,
        Member(coordinator, "paris") as paris,
    ):
        paris.enter()

        def settings(key: str) -> list[object]:
            client = StatusClient(coordinator.address)
            found = client.fetch()["settings"][key]
            client.close()
            keys = ("value", "configured", "ordered", "pending", "pending_round")
            return [found[name] for name in keys]

        assert settings("outer.alpha") == [1.0, 1.0, None, None, None]
        assert settings("codec.k") == [256, 256, None, None, None]
        assert settings("inner.steps") == [3, 3, None, None, None]
        order(coordinator, "set", "codec.k=128")
        assert settings("codec.k") == [256, 256, None, 128.0, 1]
        finish_round(coordinator, (paris,))
        assert settings("codec.k") == [128.0, 128, 128.0, None, None]
        finish_round(coordinator, (paris,))
        assert settings("outer.alpha") == [0.7, 0.7, None, None, None]
        assert settings("codec.k") == [128.0, 64, 128.0, None, None]
        order(coordinator, "pause")
        finish_round(coordinator, (paris,))
        order(coordinator, "set", "inner.steps=9")
        assert settings("inner.steps") == [3, 3, None, 9.0, 3]
        order(coordinator, "resume")
        assert settings("inner.steps") == [9.0, 3, 9.0, None, None]


def test_pause_finishes_the_round_and_opens_none_until_resume(
    coordinator: Coordinator, sites: tuple[Member, Member]
) -> None:
    order(coordinator, "pause")
    finish_round(coordinator, sites)
    answer = sites[0].wait(1)
    assert answer.directive == pb.DIRECTIVE_WAIT
    assert "paused" in answer.message
    assert status(coordinator)["hold"] == "paused"
    order(coordinator, "resume")
    assert sites[0].wait(1, timeout=5.0).directive == pb.DIRECTIVE_TRAIN


def test_drain_lets_all_sites_go_after_the_round(
    coordinator: Coordinator, sites: tuple[Member, Member]
) -> None:
    order(coordinator, "drain")
    assert sites[0].wait(0).directive == pb.DIRECTIVE_TRAIN
    finish_round(coordinator, sites)
    assert [site.wait(1).directive for site in sites] == [pb.DIRECTIVE_FINISHED] * 2


def test_snapshot_is_written_at_the_end_of_the_round(
    coordinator: Coordinator, sites: tuple[Member, Member]
) -> None:
    order(coordinator, "snapshot")
    finish_round(coordinator, sites)
    eventually(lambda: coordinator.store.snapshots.newest().round == 1, "it is written")


def test_a_snapshot_asked_for_while_the_round_is_reduced_is_written_after_it(
    coordinator: Coordinator, sites: tuple[Member, Member]
) -> None:
    reducer, go_on = coordinator.running.engine._reducer, threading.Event()
    assert reducer is not None
    reduce = reducer.reduce

    def reduce_later(state: State) -> Reduced:
        go_on.wait(20)
        return reduce(state)

    reducer.reduce = reduce_later  # type: ignore[method-assign]
    for seed, site in enumerate(sites):
        site.contribute(0, vector(LAYOUT, seed))
    eventually(lambda: coordinator.state.phase == "closing", "it is reduced")
    order(coordinator, "snapshot")
    go_on.set()
    eventually(lambda: coordinator.store.snapshots.newest().round == 1, "it is written")


def test_a_snapshot_of_a_run_that_rests_is_written_at_once(
    coordinator: Coordinator, sites: tuple[Member, Member]
) -> None:
    order(coordinator, "pause")
    finish_round(coordinator, sites)
    assert coordinator.store.snapshots.newest().round == 0
    assert "a snapshot of round 1 is written now" in order(coordinator, "snapshot")
    eventually(lambda: coordinator.store.snapshots.newest().round == 1, "it is written")
    assert not coordinator.state.snapshot_due
    order(coordinator, "snapshot")  # there is one: nothing more to do
    order(coordinator, "resume")
    finish_round(coordinator, sites)
    assert coordinator.store.snapshots.newest().round == 1


def test_only_who_was_put_out_is_readmitted(
    coordinator: Coordinator, sites: tuple[Member, Member]
) -> None:
    with pytest.raises(RefusedError, match="site 'paris' is ready: only one that is evicted or"):
        order(coordinator, "readmit", "paris")
    finish_round(coordinator, sites)


def test_an_evicted_site_is_out_until_it_is_readmitted(
    coordinator: Coordinator, sites: tuple[Member, Member]
) -> None:
    order(coordinator, "evict", "paris")
    with pytest.raises(Exception, match="evicted"):
        sites[0].wait(0)
    with pytest.raises(Exception, match="readmit paris"):
        sites[0].join()
    order(coordinator, "readmit", "paris")
    assert sites[0].join().incarnation == 2


@pytest.mark.parametrize(
    ("verb", "argument", "names"),
    [
        ("set", "outer.alpha=99", "outer.alpha"),
        ("set", "codec.k=0", "codec.k"),
        ("set", "model.dim=8", "outer.alpha, codec.k, inner.steps"),
        ("evict", "rome", "oslo, paris"),
    ],
)
def test_an_impossible_order_says_what_is_possible(
    verb: str,
    argument: str,
    names: str,
    coordinator: Coordinator,
    sites: tuple[Member, Member],
) -> None:
    with pytest.raises(RefusedError, match=names) as caught:
        order(coordinator, verb, argument)
    assert caught.value.reason == "control"
