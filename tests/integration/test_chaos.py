"""The chaos harness itself: a short run of it, and the kinds that a long one gets.

Compared with: what must hold after any fault (`tests.chaos.verdict`, `tests.chaos.steps`). The long
run is `make chaos`. Run alone: pytest tests/integration/test_chaos.py
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from chaos.__main__ import SITES, disturb
from chaos.kinds import KINDS, SHARES, plan, split
from chaos.runs import torchft_run
from chaos.steps import Step, disagreements, phases
from chaos.verdict import account, counted_twice, read_log

from coordinator.events import Event, RoundClosed, RoundCommitted, ShardStored


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_leader_of_a_site_dies_in_the_middle_of_a_push(tmp_path: Path) -> None:
    """Under torchft: another rank goes on with the upload, and the coordinator does not notice."""
    pytest.importorskip("torchft", reason="torchft has no wheel for this machine")
    kinds = ["torchft: leader dies in a push"]
    outcome = disturb(tmp_path, torchft_run(seed=1), SITES["torchft"], kinds, random.Random(1))
    assert outcome.failures == []
    assert list(outcome.kinds) == kinds
    assert outcome.account is not None
    assert outcome.account.included == outcome.account.accepted == 2 * outcome.account.rounds > 0
    assert outcome.steps_compared > 0
    assert outcome.compared > 0


def test_every_kind_has_a_run_and_every_run_its_part_of_the_faults() -> None:
    had = {kind for share in SHARES.values() for kind in (*share.often, *share.rarely)}
    assert had == set(KINDS)
    for count in (1, 7, 200):
        assert sum(split(count, list(SHARES)).values()) == count
    for run, share in SHARES.items():
        kinds = plan(60, random.Random(3), run)
        assert set(kinds) == {*share.often, *share.rarely}
        assert kinds == plan(60, random.Random(3), run), "the seed says it all"


def step(cursor: int, hash_: str, *members: int) -> Step:
    return Step(
        cursor=cursor, slot=0, members=list(members), hash=hash_, at=float(cursor), lost=0.0
    )


def test_a_rank_with_other_parameters_and_a_step_left_out_are_found() -> None:
    calm = [step(1, "a", 0), step(2, "b", 0, 1), step(2, "b", 0, 1), step(3, "c", 1)]
    assert disagreements(calm) == []
    assert phases(calm) == [([0], 1), ([0, 1], 1), ([1], 1)]
    astray = [*calm, step(3, "d", 1), step(5, "e", 1)]
    found = disagreements(astray)
    assert len(found) == 2
    assert "parameters differ at step 3" in found[0]
    assert found[1] == "step 4 was left out"


def pushed(incarnation: int, round_: int, data_cursor: int, *, inner_steps: int = 2) -> ShardStored:
    return ShardStored(
        site="paris",
        incarnation=incarnation,
        round=round_,
        fragment=0,
        shard=0,
        num_shards=1,
        size_bytes=1,
        digest="",
        tokens=1,
        inner_steps=inner_steps,
        data_cursor=data_cursor,
    )


def committed(round_: int, *included: str) -> list[Event]:
    closed = RoundClosed(round=round_, included=included, missing=())
    return [
        closed,
        RoundCommitted(round=round_, update_digest="", update_bytes=1, theta_digest="ab" * 16),
    ]


def test_only_a_later_life_from_before_the_round_excuses_a_contribution_that_is_gone() -> None:
    """Resumed at round 10 by life 2: what life 1 pushed there, and not what life 2 pushed to 50."""
    lines = ["going on from the checkpoint of round 10, as incarnation 2"]
    events = [pushed(1, 10, 20), *committed(10), pushed(2, 50, 100), *committed(50)]
    books = account(events, {"paris": read_log(lines)})
    assert (books.accepted, books.kept, books.lost) == (2, 1, [("paris", 50)])
    lines.append("going on from the checkpoint of round 51, as incarnation 3")
    assert account(events, {"paris": read_log(lines)}).lost == [("paris", 50)]
    lines.append("going on from the checkpoint of round 50, as incarnation 4")
    assert account(events, {"paris": read_log(lines)}).lost == []
    said = f"round 50: contribution not included, kept in error feedback; theta is now {'ab' * 8}"
    assert account(events, {"paris": read_log([lines[0], said])}).lost == []


def test_steps_in_two_contributions_that_were_included_are_found() -> None:
    calm = [pushed(1, 0, 2), *committed(0, "paris"), pushed(1, 1, 4), *committed(1)]
    again = [pushed(2, 1, 4), *committed(1, "paris")]  # not included before, so it may come again
    assert counted_twice([*calm, *again]) == []
    more = [pushed(2, 2, 8, inner_steps=5), *committed(2, "paris")]
    assert counted_twice([*calm, *again, *more]) == ["round 2 counts steps 3-4 of paris again"]
