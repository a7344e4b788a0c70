"""Operators' orders: journaled, in force at the round boundary on all sites, shown in the status.

Compared with: the plans that sites are given, the journal, and what a restarted coordinator knows.
Run alone: pytest tests/integration/test_control.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.live import Coordinator, Member, coordinating, eventually
from support.runs import LAYOUT, config_of, create_store, vector

from coordinator.events import SettingChanged
from coordinator.store import Store
from loco.control import control
from loco.errors import RefusedError
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
