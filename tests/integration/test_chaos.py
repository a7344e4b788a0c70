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
