"""What a site contributed before it died is in the updates: once, and not again from its new life.

Compared with: theta of the same run without the death, in every bit; the steps that the coordinator
counted; and the error feedback and parameters of the real worker. Run alone:
pytest tests/integration/test_repeating.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from chaos.lives import Killed, Life, Moment, at
from chaos.numpy_site import NumpySite, SiteThread
from chaos.proxy import Proxy
from chaos.verdict import counted_twice
from support.live import Coordinator, eventually
from support.one_site import (
    IMPATIENT,
    ROUNDS,
    H,
    config_of_run,
    digests,
    events_of,
    run_of,
    stored,
    watch_feedback,
)

from loco.control import control
from worker import meanwhile

MAX_LOCAL = 7
CUT_OFF = 2
"""The round whose contribution a partition holds up until no further step may be made ahead."""
NEVER: Moment = lambda _what, _round: False  # noqa: E731
DELAYED = {"delay_steps": 1, "fragments": 3}


@pytest.fixture(autouse=True)
def short_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meanwhile, "AWAY_SECONDS", 3.0)
    monkeypatch.setattr(meanwhile, "VOTE_SECONDS", 0.1)
    torch.set_num_threads(1)


def cut_off(
    coordinator: Coordinator,
    *,
    ahead: int,
    round_: int,
    is_over: Moment = NEVER,
    checkpoint: Path | None = None,
    every: int = 1,
) -> BaseException | None:
    """A life that makes `ahead` steps in a partition before it may contribute to a round."""
    host, port = coordinator.address.split(":")
    proxy = Proxy((host, int(port)))
    partitions: list[int] = []

    def begin(what: str, now: int) -> bool:
        if (what, now) == ("before push", round_) and not partitions:
            partitions.append(now)
            proxy.partition()
        if (what, now) == ("after push", round_):  # no step ahead because of a late heartbeat
            eventually(lambda: life.worker._pulse.silent_seconds == 0, "heartbeats are answered")
        return is_over(what, now)

    life = Life(proxy.address, "paris", checkpoint=checkpoint, every=every, is_over=begin)
    try:
        eventually(lambda: partitions, "the partition begins")
        eventually(lambda: life.worker._trainer.local_steps == ahead, "all steps ahead are made")
        proxy.heal()
        return life.ends()
    finally:
        proxy.close()


def through_a_partition(
    directory: Path, outer: dict[str, int], *, every: int = 1, is_over: Moment | None = None
) -> tuple[dict[int, str], list[tuple[int, int]]]:
    """theta by round, and what was counted: (steps, place in the data) of each contribution.

    With `is_over` the site dies there, and comes back from its checkpoint.
    """
    config = config_of_run(inner={"max_local_steps": MAX_LOCAL}, outer=outer)
    ahead = MAX_LOCAL - H + outer.get("delay_steps", 0)
    with run_of(directory, config) as coordinator:
        checkpoint = directory / "checkpoint"
        error = cut_off(
            coordinator,
            ahead=ahead,
            round_=CUT_OFF,
            is_over=is_over or NEVER,
            checkpoint=checkpoint,
            every=every,
        )
        if is_over is not None:
            assert isinstance(error, Killed)
            Life(coordinator.address, "paris", checkpoint=checkpoint, every=every).finishes()
        assert counted_twice(events_of(coordinator)) == []
        counted = [(s.inner_steps, s.data_cursor) for s in stored(coordinator)]
        return digests(coordinator), counted


@pytest.mark.parametrize("outer", [{}, DELAYED], ids=["blocking", "delayed"])
def test_steps_ahead_that_were_contributed_are_contributed_once(
    tmp_path: Path, outer: dict[str, int]
) -> None:
    """The checkpoint holds some of the steps of a contribution that a later one completed."""
    wanted, counted = through_a_partition(tmp_path / "alive", outer)
    steps = [H] * (CUT_OFF + 1) + [MAX_LOCAL] + [H] * (ROUNDS - CUT_OFF - 2)
    assert counted == [(s, sum(steps[: i + 1])) for i, s in enumerate(steps)]
    deaths = {"once": (1, CUT_OFF + 1), "rounds between": (3, CUT_OFF + 3)}
    for name, (every, round_) in deaths.items():
        over = at("after push", round_)
        found = through_a_partition(tmp_path / name, outer, every=every, is_over=over)
        assert found == (wanted, counted), name


def test_steps_ahead_are_counted_once_where_they_cannot_be_made_at_their_place(
    tmp_path: Path,
) -> None:
    """From a checkpoint before the partition they are made after the update, not before it."""
    over = at("after push", CUT_OFF + 1)
    _, counted = through_a_partition(tmp_path, {}, every=2, is_over=over)
    assert [steps for steps, _ in counted] == [H, H, H, MAX_LOCAL, H, H, H]
    assert counted[-1][1] == sum(steps for steps, _ in counted)


def test_what_cannot_be_repeated_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A contribution since the checkpoint came too late, later ones were included: they held it.

    The checkpoint has EF, and steps made ahead; none of both is sent again.
    """
    config = config_of_run(
        quorum=IMPATIENT,
        run={"rounds": 100_000},
        inner={"max_local_steps": MAX_LOCAL},
        state={"keep_updates": 100_000},
    )
    checkpoint = tmp_path / "checkpoint"
    began_with = watch_feedback(monkeypatch)
    with run_of(tmp_path, config) as coordinator:
        over = at("before push", 2)
        ahead = MAX_LOCAL - H
        first = cut_off(coordinator, ahead=ahead, round_=1, is_over=over, checkpoint=checkpoint)
        assert isinstance(first, Killed)
        oslo = SiteThread(NumpySite(coordinator.address, "oslo", coordinator.store.layout))
        eventually(lambda: coordinator.state.round > 2, "oslo makes rounds without paris")
        missed: list[int] = []

        def miss_one_and_be_in_two(what: str, round_: int) -> bool:
            if what == "before push" and not missed:
                missed.append(round_)
                eventually(lambda: coordinator.state.round > round_, "it is closed")
            included = coordinator.state.sites["paris"].rounds_included
            return what == "after push" and included >= 2 + 2

        second = Life(
            coordinator.address,
            "paris",
            checkpoint=checkpoint,
            every=1_000_000,
            is_over=miss_one_and_be_in_two,
        )
        assert isinstance(second.ends(), Killed)
        began_with.clear()
        third = Life(
            coordinator.address,
            "paris",
            checkpoint=checkpoint,
            every=1_000_000,
            is_over=lambda what, _round: what == "before push",
        )
        assert isinstance(third.ends(), Killed)
        ((round_, feedback),) = began_with.items()
        assert round_ > max(missed)
        assert np.count_nonzero(feedback) == 0
        header = third.worker._at.pending.header
        assert header.inner_steps == H
        assert header.data_cursor == coordinator.state.sites["paris"].data_cursor + H
        assert f"error feedback and {ahead} inner steps are dropped" in caplog.text
        control(coordinator.address, "drain", None)
        oslo.join()
        assert counted_twice(events_of(coordinator)) == []
