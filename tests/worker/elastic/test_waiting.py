"""Two of three ranks die and come back while the site waits: real processes, real training (gloo).

Compared with: what must hold: each step is made once, by the survivor and whoever is there, with
one hash on all ranks; and all three are there at the end.

    pytest tests/worker/elastic/test_waiting.py
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.live import eventually
from support.members import RANK_TIMEOUT, Members, plan_of
from support.runs import config_of

pytest.importorskip("torchft", reason="torchft has no wheel for this machine")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS, WAIT_AT = 150, 10
ALL = r"going on as rank 0 of 1, (0, 2|2, 0)\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Members]:
    """Three ranks that train until they wait."""
    monkeypatch.setenv("LOCO_CACHE_DIR", str(tmp_path / "cache"))
    corpus = tmp_path / "text.txt"
    corpus.write_text("sphinx of black quartz, judge my vow. " * 300)
    small = {"dim": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 32}
    config = config_of(
        model={**small, "seq_len": 16},
        data={"batch": 6},
        inner={"lr": 0.01, "warmup_steps": 3, "optimizer": "adamw"},
        eval={"sequences": 4},
    )

    def make(**options: Any) -> Members:
        plan = plan_of(
            tmp_path / "site", config, corpus=corpus, steps=STEPS, ranks=3, wait_at=WAIT_AT,
            step_seconds=0.05, **options,
        )  # fmt: skip
        return Members(tmp_path / "site", plan)

    return make


def lose_two(site: Members) -> None:
    """All wait, then two of them die, and their successors come."""
    site.prepare(0, 1, 2, 0, 2)
    site.let_in(0, 1, 2)
    site.reach(WAIT_AT, 0, 1, 2)
    site.kill(0, 2)
    site.let_in(0, 2)


def check(site: Members) -> None:
    """All waited for the survivor, and went on from its state to the end."""
    site.end_wait()
    site.finish()
    site.check(STEPS)
    assert all(1 in step.members for step in site.all_steps()), site.log
    assert sorted(site.phases()[-1][0]) == [0, 1, 2], site.log
    assert len([step for step in site.all_steps() if step.slot == 1]) == STEPS, site.log


def test_who_comes_back_is_taken_in_while_the_site_waits(site: Callable[..., Members]) -> None:
    """A paused run may wait for days: the survivor asks the lighthouse in each turn of waiting."""
    with site() as members:
        lose_two(members)
        members.says(ALL, seconds=60.0)
        check(members)


def test_nobody_begins_anew_while_a_rank_in_a_long_step_has_the_state(
    site: Callable[..., Members],
) -> None:
    """It asks nobody, so after the join time-out the two are a quorum without it.

    When the lighthouse dies and forgets the survivor they are one at once, and have waited long.
    """
    with site(waits_for="step", join_timeout_seconds=RANK_TIMEOUT) as members:
        lose_two(members)
        eventually(lambda: refused_seconds(members) > 10, "nobody begins", 100.0)
        members.kill_lighthouse()
        members.start_lighthouse()
        before = refused_seconds(members)
        eventually(lambda: refused_seconds(members) > before + 10, "nor begins now", 100.0)
        assert "of 0, 2\n" not in members.log, members.log
        check(members)


def refused_seconds(members: Members) -> int:
    """For how long a rank has waited for the survivor's state, as it says every 5 s."""
    said = re.findall(r"no group for (\d+) s: rank 1 .* has the state of the site", members.log)
    return max(map(int, said), default=0)
