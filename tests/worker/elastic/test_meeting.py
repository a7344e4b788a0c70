"""What members that meet decide: the same for all, nothing committed lost, nobody healed in vain.

Compared with: the rules in words, over all small histories that hypothesis finds.
Run alone: pytest tests/worker/elastic/test_meeting.py
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loco.errors import ConfigError
from worker.elastic.meeting import Hello, Plan, Standing, decide
from worker.elastic.quorum import Member


def member(slot: int) -> Member:
    return Member(slot, f"10.0.0.{slot}:7", f"{slot:08x}")


def at(version: int, label: str, rank: int, size: int, backup_of: int = -1) -> Standing:
    return Standing(version=version, label=label, rank=rank, size=size, backup_of=backup_of)


def hello(
    slot: int, now: Standing | None, staged: Standing | None = None, *, prepared: bool = True
) -> Hello:
    return Hello(
        id=member(slot).id,
        store=f"10.0.0.{slot}:8",
        now=now,
        staged=staged,
        waiting_seconds=0.0,
        prepared=prepared,
    )


def slots(ids: tuple[str, ...]) -> list[int]:
    return [Member.of(id_).slot for id_ in ids]


def test_without_any_state_the_site_begins_in_the_order_of_slots() -> None:
    plan = decide([hello(slot, None) for slot in (10, 2, 1)], "g")
    assert plan.begins
    assert slots(plan.order) == [1, 2, 10], "ids of fixed width: torchft sorts them as text"
    assert plan.store == "10.0.0.1:8"


def test_a_vote_that_reached_one_member_only_counts_for_all() -> None:
    """Two generals: rank 0 committed step 8, the others staged it and lost the vote's answer."""
    before = [at(7, "g", rank, 3) for rank in range(3)]
    after = [at(8, "g", rank, 3) for rank in range(3)]
    plan = decide(
        [hello(0, after[0]), hello(1, before[1], after[1]), hello(2, before[2], after[2])], "h"
    )
    assert (slots(plan.order), slots(plan.finish), plan.heal) == ([0, 1, 2], [1, 2], {})
    assert plan.change.holders == (0, 1, 2)


def test_a_step_that_nobody_committed_is_void() -> None:
    hellos = [hello(rank, at(7, "g", rank, 2), at(8, "g", rank, 2)) for rank in range(2)]
    plan = decide(hellos, "h")
    assert (plan.finish, plan.heal) == ((), {})


def test_who_was_there_keeps_its_place_and_who_is_new_comes_last() -> None:
    """So the leader stays the leader while it lives, whatever slot a newcomer has."""
    plan = decide([hello(0, None), hello(1, at(9, "g", 1, 3)), hello(2, at(9, "g", 0, 3))], "h")
    assert slots(plan.order) == [2, 1, 0]
    assert {Member.of(k).slot: Member.of(v).slot for k, v in plan.heal.items()} == {0: 2}
    assert plan.change.holders == (0, 1, None)
    assert plan.change.lost_fraction == pytest.approx(1 / 3)


def test_a_new_member_first_fetches_what_it_can_while_the_others_go_on_without_it() -> None:
    """Those who are there wait for nobody who could still do something beside their training."""
    here = [hello(rank, at(9, "g", rank, 2)) for rank in range(2)]
    plan = decide([*here, hello(2, None, prepared=False), hello(3, None)], "h")
    assert slots(plan.order) == [0, 1, 3]
    assert {Member.of(k).slot: Member.of(v).slot for k, v in plan.later.items()} == {2: 0}
    assert {Member.of(k).slot: Member.of(v).slot for k, v in plan.heal.items()} == {3: 0}


def test_where_nobody_has_a_state_nobody_has_to_fetch_one() -> None:
    plan = decide([hello(slot, None, prepared=False) for slot in (0, 1)], "g")
    assert (slots(plan.order), plan.later, plan.begins) == ([0, 1], {}, True)


def test_a_backup_stands_in_for_the_dead_rank_before_it() -> None:
    plan = decide(
        [hello(1, at(9, "g", 1, 3, backup_of=0)), hello(2, at(9, "g", 2, 3, backup_of=1))], "h"
    )
    assert plan.change.holders == (0, 0, 1)
    assert plan.change.lost_fraction == 0


def test_a_sleeper_with_an_equal_version_of_another_group_takes_the_state_of_the_many() -> None:
    """It committed step 8 in a group that had given it up; the others made another step 8."""
    plan = decide(
        [
            hello(0, at(8, "old", 0, 3)),
            hello(1, at(8, "new", 0, 2)),
            hello(2, at(8, "new", 1, 2)),
        ],
        "h",
    )
    assert slots(plan.order) == [1, 2, 0]
    assert slots(tuple(plan.heal)) == [0]


def test_one_that_trained_on_alone_does_not_outvote_two() -> None:
    plan = decide(
        [hello(0, at(50, "alone", 0, 1)), hello(1, at(8, "g", 0, 2)), hello(2, at(8, "g", 1, 2))],
        "h",
    )
    assert slots(plan.order) == [1, 2, 0]


def test_forming_a_group_is_finished_with_the_ranks_of_that_group() -> None:
    """Rank 1 of the old group is rank 0 of the new one, which only it adopted."""
    plan = decide(
        [
            hello(1, at(8, "new", 0, 2)),
            hello(2, at(7, "old", 2, 3), at(8, "new", 1, 2)),
        ],
        "h",
    )
    assert (slots(plan.finish), plan.change.holders) == ([2], (0, 1))


def test_strangers_at_the_lighthouse_are_named() -> None:
    with pytest.raises(ConfigError, match="a lighthouse of its own"):
        Member.of("train_ddp_0:1f3a")
    assert Member.of(member(3).id) == member(3)


standings = st.builds(
    at, st.integers(0, 3), st.sampled_from("gh"), st.integers(0, 3), st.just(4), st.integers(-1, 3)
)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.none() | standings, st.none() | standings), min_size=1, max_size=5),
    st.integers(0, 99),
)
def test_whatever_they_say_in_whatever_order_the_plan_is_one_and_whole(
    said: list[tuple[Standing | None, Standing | None]], seed: int
) -> None:
    hellos = [hello(slot, now, staged) for slot, (now, staged) in enumerate(said)]
    plan = decide(hellos, "n")
    shuffled = random.Random(seed).sample(hellos, len(hellos))
    assert decide(shuffled, "n") == plan
    assert sorted(plan.order) == sorted(h.id for h in hellos), "everyone has one place"
    healed, finishing = set(plan.heal), set(plan.finish)
    assert not healed & finishing
    assert set(plan.heal.values()) <= set(plan.order) - healed, "nobody heals from the unhealed"
    assert _first_has_state(plan, hellos)
    size = len(plan.order) - len(healed)
    assert all(holder is None or 0 <= holder < size for holder in plan.change.holders)


def _first_has_state(plan: Plan, hellos: list[Hello]) -> bool:
    """A member without state never leads those who have one."""
    if all(h.now is None for h in hellos):
        return plan.begins and not plan.heal
    return plan.order[0] not in plan.heal and not plan.begins
