"""Coming back: what a site keeps in each case. The rules are the table of docs/rejoin.md.

Compared with: theta of every round of a run in which the same site was never away, in every bit;
and the site's own error feedback and place in the data. Run alone:
pytest tests/integration/test_rejoin.py
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from chaos.lives import Killed, Life, at
from chaos.numpy_site import NumpySite, SiteThread
from support.live import Coordinator, eventually
from support.one_site import (
    IMPATIENT,
    ROUNDS,
    H,
    config_of_run,
    create,
    digests,
    events_of,
    let_others_make_rounds,
    run_of,
    stored,
    watch_feedback,
)

from coordinator import engine
from coordinator.events import RoundOpened
from coordinator.store import Store
from loco.control import control
from loco.errors import RefusedError, UnreachableError


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    torch.set_num_threads(1)
    with run_of(tmp_path_factory.mktemp("undisturbed"), config_of_run()) as coordinator:
        Life(coordinator.address, "paris").finishes()
        return digests(coordinator)


# --- with a checkpoint ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "moment", "round_"),
    [
        (1, "asks", 3),  # its contribution is sent, what comes next is not known
        (1, "before push", 3),
        (1, "after push", 3),  # the contribution counts, the site never heard of it
        (1, "before pull", 3),
        (1, "after pull", 3),
        (2, "after push", 3),
        (3, "before push", 5),  # rounds 3 and 4 are made again before it goes on
        (3, "after push", 5),
    ],
)
def test_killed_and_back_from_a_checkpoint_nothing_differs_in_any_bit(
    every: int, moment: str, round_: int, tmp_path: Path, undisturbed: dict[int, str]
) -> None:
    checkpoint = tmp_path / "checkpoint"
    with run_of(tmp_path, config_of_run()) as coordinator:
        first = Life(
            coordinator.address,
            "paris",
            checkpoint=checkpoint,
            every=every,
            is_over=at(moment, round_),
        )
        assert isinstance(first.ends(), Killed)
        Life(coordinator.address, "paris", checkpoint=checkpoint, every=every).finishes()
        assert digests(coordinator) == undisturbed
        cursors = [shard.data_cursor for shard in stored(coordinator)]
        assert cursors == [H * (r + 1) for r in range(ROUNDS)]  # no sample twice, none left out


def test_killed_in_every_round(tmp_path: Path, undisturbed: dict[int, str]) -> None:
    checkpoint = tmp_path / "checkpoint"
    with run_of(tmp_path, config_of_run()) as coordinator:
        for round_ in range(1, ROUNDS):
            moment = "after push" if round_ % 2 else "before push"
            life = Life(
                coordinator.address, "paris", checkpoint=checkpoint, is_over=at(moment, round_)
            )
            assert isinstance(life.ends(), Killed)
        Life(coordinator.address, "paris", checkpoint=checkpoint).finishes()
        assert digests(coordinator) == undisturbed


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    tmp_path: Path, undisturbed: dict[int, str]
) -> None:
    checkpoint = tmp_path / "checkpoint"
    with run_of(tmp_path, config_of_run()) as coordinator:
        first = Life(coordinator.address, "paris", checkpoint=checkpoint, is_over=at("asks", 3))
        assert isinstance(first.ends(), Killed)
        newest = max(checkpoint.glob("round-*"))
        assert newest.name == "round-00000003"
        file = max(newest.rglob("*.safetensors"))
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        Life(coordinator.address, "paris", checkpoint=checkpoint).finishes()
        assert digests(coordinator) == undisturbed


def test_what_a_kill_left_half_written_is_no_checkpoint(
    tmp_path: Path, undisturbed: dict[int, str]
) -> None:
    """Killed while it saved: before the rename, and (by a power cut) after it."""
    checkpoint = tmp_path / "checkpoint"
    with run_of(tmp_path, config_of_run()) as coordinator:
        first = Life(coordinator.address, "paris", checkpoint=checkpoint, is_over=at("asks", 3))
        assert isinstance(first.ends(), Killed)
        newest = max(checkpoint.glob("round-????????"))
        for name in ("round-00000004.partial", "round-00000005"):
            shutil.copytree(newest, checkpoint / name)
            (checkpoint / name / "manifest.json").unlink()
        torn = Path(shutil.copytree(newest, checkpoint / "round-00000006"))
        manifest = torn / "manifest.json"
        manifest.write_bytes(manifest.read_bytes()[:100])
        Life(coordinator.address, "paris", checkpoint=checkpoint).finishes()
        assert digests(coordinator) == undisturbed
        cursors = [shard.data_cursor for shard in stored(coordinator)]
        assert cursors == [H * (r + 1) for r in range(ROUNDS)]


def test_a_checkpoint_too_old_for_the_updates_keeps_the_data_and_drops_the_ef(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Away for more rounds than `keep_updates`: theta comes from a snapshot."""
    checkpoint = tmp_path / "checkpoint"
    changes = {"state": {"snapshot_every_rounds": 2, "keep_updates": 2}}
    with run_of(tmp_path, config_of_run(**changes, quorum=IMPATIENT)) as coordinator:
        first = Life(
            coordinator.address, "paris", checkpoint=checkpoint, is_over=at("before push", 2)
        )
        assert isinstance(first.ends(), Killed)
        let_others_make_rounds(coordinator, until_round=6)
        second = Life(coordinator.address, "paris", checkpoint=checkpoint)
        second.finishes()
        assert "is too old: its EF is dropped" in caplog.text
        # Two rounds of its own before, then it goes on in its data behind them.
        mine = [s.data_cursor for s in stored(coordinator) if s.site == "paris"]
        assert mine == [H, 2 * H, 3 * H]


# --- without one ---------------------------------------------------------------------------------


def test_a_site_whose_state_was_lost_begins_with_empty_ef_and_goes_on_in_its_data(
    tmp_path: Path,
) -> None:
    with run_of(tmp_path, config_of_run()) as coordinator:
        first = Life(coordinator.address, "paris", is_over=at("after push", 4))
        assert isinstance(first.ends(), Killed)
        second = Life(coordinator.address, "paris", is_over=at("before push", 5))
        assert isinstance(second.ends(), Killed)
        # Five rounds are included, the last of them was made by the life before.
        assert second.worker._trainer.data_cursor == 6 * H
        assert [s.data_cursor for s in stored(coordinator)] == [H * (r + 1) for r in range(5)]
        assert digests(coordinator)[4] == coordinator.state.theta_digest
        # EF is what one round leaves behind: a - v with e = 0 before it.
        exchange = second.worker._exchange
        sent = np.concatenate([part.originals for _, part in exchange._sent.parts])
        largest_left = np.abs(exchange._ef).max()
        assert largest_left <= np.abs(sent).max()


def test_a_new_site_begins_at_its_first_sample_with_theta_checked(tmp_path: Path) -> None:
    """A late joiner is never in the round in progress, and holds theta before its first step."""
    with run_of(tmp_path, config_of_run()) as coordinator:
        let_others_make_rounds(coordinator, until_round=5)
        paris = Life(coordinator.address, "paris")
        paris.finishes()
        opened = [
            e
            for e in events_of(coordinator)
            if isinstance(e, RoundOpened) and "paris" in e.expected
        ]
        assert min(e.round for e in opened) == 5
        mine = [s for s in stored(coordinator) if s.site == "paris"]
        assert [(s.round, s.data_cursor) for s in mine] == [(5, H), (6, 2 * H)]
        assert paris.worker._at.theta_digest == coordinator.state.theta_digest


# --- away, but alive -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rounds_away", "keep_updates", "keeps_ef"),
    [
        (1, 10, True),
        (5, 10, True),
        (5, 2, False),
        pytest.param(500, 600, True, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
        pytest.param(500, 10, False, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_a_site_that_was_away(
    rounds_away: int,
    keep_updates: int,
    keeps_ef: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """EF stays with the theta that updates lead on; where a snapshot replaces theta, it goes."""
    monkeypatch.setattr(engine, "TICK_SECONDS", 0.01)  # each round waits for the grace to be over
    quorum = {**IMPATIENT, "grace_seconds": 0.01}
    changes = {
        "run": {"rounds": rounds_away + 2},
        "state": {"snapshot_every_rounds": 2, "keep_updates": keep_updates},
    }
    began_with = watch_feedback(monkeypatch)
    left = {}
    with run_of(tmp_path, config_of_run(**changes, quorum=quorum)) as coordinator:

        def stay_away(what: str, round_: int) -> bool:
            if (what, round_) == ("before push", 0):  # or the first update says how to go on
                control(coordinator.address, "pause", None)
            if (what, round_) == ("asks", 1):
                left[1] = paris.worker._exchange._ef.copy()
                eventually(lambda: "oslo" in coordinator.state.ready, "oslo is there")
                control(coordinator.address, "resume", None)
                gone = 1 + rounds_away
                eventually(lambda: coordinator.state.round >= gone, "they are made", seconds=600)
            return what == "before push" and round_ > 0

        paris = Life(coordinator.address, "paris", is_over=stay_away)
        eventually(lambda: left, "paris has applied the first update")
        let_others_make_rounds(coordinator, until_round=1 + rounds_away)
        assert isinstance(paris.ends(seconds=300), Killed)
        first_round, *own = began_with
        assert first_round == 0
        assert own == [coordinator.state.round]
        assert np.count_nonzero(left[1])
        wanted = left[1] if keeps_ef else np.zeros_like(left[1])
        np.testing.assert_array_equal(began_with[own[0]], wanted)


def test_what_the_real_worker_contributed_too_late_stays_in_its_ef(tmp_path: Path) -> None:
    """Rounds close while its push is held up: nothing of its steps is lost, none comes twice.

    It is its first contribution, so EF was zero and must be theta - params in every bit.
    """
    config = config_of_run(quorum=IMPATIENT, run={"rounds": 100_000})
    with run_of(tmp_path, config) as coordinator:
        oslo = SiteThread(NumpySite(coordinator.address, "oslo", coordinator.store.layout))
        eventually(lambda: coordinator.state.round > 0, "oslo makes rounds")
        held_up: list[int] = []
        feedback = {}

        def hold_up(what: str, round_: int) -> bool:
            exchange = paris.worker._exchange
            if what == "before push" and not held_up:
                held_up.append(round_)
                feedback["wanted"] = exchange._theta - exchange._anchor
                feedback["without v"] = exchange._ef.copy()
                eventually(lambda: coordinator.state.round > round_ + 2, "three rounds closed")
            if what == "asks" and held_up and round_ == held_up[0] + 1:
                feedback["kept"] = exchange._ef.copy()
            return what == "before pull" and bool(held_up) and round_ > held_up[0] + 10

        paris = Life(coordinator.address, "paris", is_over=hold_up)
        assert isinstance(paris.ends(), Killed)
        np.testing.assert_array_equal(feedback["kept"], feedback["wanted"])
        assert (feedback["wanted"] != feedback["without v"]).sum() > 1000
        mine = [s for s in stored(coordinator) if s.site == "paris"]
        assert held_up[0] not in [s.round for s in mine]
        # Steps were never contributed twice, and those of the round held up were made, too.
        cursors = [s.data_cursor for s in mine]
        assert cursors == sorted(set(cursors))
        assert cursors[0] == H * (1 + 1)
        assert paris.worker._at.theta_digest in digests(coordinator).values()
        control(coordinator.address, "drain", None)
        oslo.join()


# --- who may come --------------------------------------------------------------------------------


def test_a_newer_life_supersedes_the_older_one(tmp_path: Path) -> None:
    with run_of(tmp_path, config_of_run(quorum={"min_sites": 2})) as coordinator:
        first = Life(coordinator.address, "paris")
        eventually(lambda: "paris" in coordinator.state.ready, "paris waits")
        second = Life(coordinator.address, "paris")
        eventually(lambda: coordinator.state.sites["paris"].incarnation == 2, "it joined again")
        error = first.ends()
        assert isinstance(error, RefusedError)
        assert error.reason == "superseded"
        assert second.running
        coordinator.running.engine.drain()
        second.session.close()
        second.ends()


def test_a_site_waits_for_its_run_at_the_address_of_another(tmp_path: Path) -> None:
    """An operator started an empty coordinator: the site keeps its progress and names both runs."""
    config = config_of_run(quorum={"min_sites": 2})
    coordinator = Coordinator(create(tmp_path / "state", config))
    address = coordinator.address
    paris = Life(address, "paris", patience=2.0)
    eventually(lambda: "paris" in coordinator.state.ready, "paris waits")
    coordinator.stop()
    store = create(tmp_path / "other", config)
    store.run_id = "another-run"
    other = Coordinator(store, listen=address)
    try:
        error = paris.ends()
    finally:
        other.stop()
    assert isinstance(error, UnreachableError)
    assert "'rejoin'" in str(error)
    assert "'another-run'" in str(error)


def test_a_site_waits_while_the_coordinator_has_an_older_state(
    tmp_path: Path, undisturbed: dict[int, str]
) -> None:
    """Refused as ahead, not started over; with the newer state back nothing differs in any bit."""
    state, newer = tmp_path / "state", tmp_path / "newer"
    held = {1, 3}  # the site waits in these rounds until the test lets it go on

    def hold(what: str, round_: int) -> bool:
        if what == "before push":
            eventually(lambda: round_ not in held, "the test goes on")
        return False

    coordinator = Coordinator(create(state, config_of_run()))
    address = coordinator.address
    paris = Life(address, "paris", is_over=hold)
    eventually(lambda: coordinator.state.round == 1, "round 1")
    coordinator.stop()
    shutil.copytree(state, tmp_path / "older")
    coordinator = Coordinator(Store.open(state), listen=address)
    held.remove(1)
    eventually(lambda: coordinator.state.round == 3, "round 3")
    coordinator.stop()
    state.rename(newer)
    older = Coordinator(Store.open(tmp_path / "older"), listen=address)
    held.remove(3)
    eventually(lambda: older.metric("loco_rejections_total", reason="ahead") > 0, "refused")
    older.stop()
    again = Coordinator(Store.open(newer), listen=address)
    try:
        paris.finishes()
        assert digests(again) == undisturbed
    finally:
        again.stop()


def test_a_site_that_an_older_state_does_not_know_joins_again(
    tmp_path: Path, undisturbed: dict[int, str]
) -> None:
    """An operator restored a copy from before the site's first join; the run is at its round."""
    state = tmp_path / "state"
    store = create(state, config_of_run())
    store.close()
    shutil.copytree(state, tmp_path / "older")
    held, trained = {0}, []

    def hold(what: str, round_: int) -> bool:
        if what == "before push":
            trained.append(round_)
            eventually(lambda: round_ not in held, "the test goes on")
        return False

    coordinator = Coordinator(Store.open(state))
    address = coordinator.address
    paris = Life(address, "paris", is_over=hold)
    eventually(lambda: trained == [0], "paris has trained round 0")
    coordinator.stop()
    older = Coordinator(Store.open(tmp_path / "older"), listen=address)
    try:
        assert older.state.sites == {}
        held.clear()
        paris.finishes()
        assert older.metric("loco_rejections_total", reason="unknown_site") >= 1
        assert digests(older) == undisturbed
        assert trained == [0, *range(ROUNDS)], "what it had trained was sent, not made again"
        cursors = [shard.data_cursor for shard in stored(older)]
        assert cursors == [H * (r + 1) for r in range(ROUNDS)]
    finally:
        older.stop()


def test_a_site_that_is_past_a_state_that_does_not_know_it_waits_for_its_own(
    tmp_path: Path, undisturbed: dict[int, str]
) -> None:
    """Joining again must not let it adopt a lower round: it is ahead, and says so."""
    state, newer = tmp_path / "state", tmp_path / "newer"
    create(state, config_of_run()).close()
    shutil.copytree(state, tmp_path / "older")
    held = {2}

    def hold(what: str, round_: int) -> bool:
        if what == "before push":
            eventually(lambda: round_ not in held, "the test goes on")
        return False

    coordinator = Coordinator(Store.open(state))
    address = coordinator.address
    paris = Life(address, "paris", is_over=hold)
    eventually(lambda: coordinator.state.round == 2, "round 2")
    coordinator.stop()
    state.rename(newer)
    older = Coordinator(Store.open(tmp_path / "older"), listen=address)
    held.clear()
    eventually(lambda: older.metric("loco_rejections_total", reason="ahead") > 0, "refused")
    assert older.state.sites == {}
    older.stop()
    again = Coordinator(Store.open(newer), listen=address)
    try:
        paris.finishes()
        assert digests(again) == undisturbed
        assert again.state.sites["paris"].incarnation == 1, "it is the same life as before"
    finally:
        again.stop()
