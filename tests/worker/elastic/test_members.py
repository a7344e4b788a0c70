"""Ranks that die, sleep and come back, as real processes around real training (gloo).

Compared with: static groups that had each membership without accidents, in every bit; else with
what must hold: no step twice, none left out, one hash a step on all ranks, bounded time.

    pytest tests/worker/elastic/test_members.py
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.members import RANK_TIMEOUT, Members, plan_of
from support.runs import config_of
from support.static import static_hashes

from loco.config import Config

pytest.importorskip("torchft", reason="torchft has no wheel for this machine")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DENSE = {"optimizer": "adamw"}
SCAPE = {"sync": "scape", "density": 0.2}
PAPER = {**SCAPE, "second_moment": "momentum", "delay": 1, "refresh": 2}


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCO_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text("sphinx of black quartz, judge my vow. " * 300)
    return path


def config(batch: int = 6, **inner: Any) -> Config:
    small = {"dim": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 32}
    return config_of(
        model={**small, "seq_len": 16},
        data={"batch": batch},
        inner={"lr": 0.01, "warmup_steps": 3, **inner},
        eval={"sequences": 4},
    )


@pytest.mark.parametrize(
    "inner",
    [SCAPE, PAPER],
    ids=["scape", "paper"],
)
def test_killed_at_random_and_back_every_bit_is_that_of_calm_runs(
    tmp_path: Path, corpus: Path, inner: dict[str, Any]
) -> None:
    """3 -> 2 by SIGKILL -> 3 by its successor; the others go on within time-out + 1 s.

    What is dense is in 1 -> 2 -> 3 -> 2 -> 3 below.
    """
    steps = 120
    plan = plan_of(
        tmp_path / "site", config(**inner), corpus=corpus, steps=steps, ranks=3,
        shard_backup=True, step_seconds=0.05,
    )  # fmt: skip
    moment = random.Random(0).uniform(0.0, 0.1)
    with Members(tmp_path / "site", plan) as site:
        site.prepare(0, 1, 2, 1)
        site.let_in(0, 1, 2)
        site.reach(10, 0, 1, 2)
        time.sleep(moment)
        killed = site.kill(1)
        resumed = site.reach(10, 0, 2, seconds=RANK_TIMEOUT + 5.0)
        assert resumed.at - killed < RANK_TIMEOUT + 1.0
        site.let_in(1)
        site.reach(10, 0, 2, 1)
        site.finish()
        committed = site.check(steps)
        phases = site.phases()
    assert [members for members, _ in phases] == [[0, 1, 2], [0, 2], [0, 2, 1]], phases
    assert all(step.lost == 0 for step in committed.values())
    sizes = [(len(members), count) for members, count in phases]
    expected = static_hashes(tmp_path, Config.model_validate(plan.config), corpus, sizes, steps)
    assert [committed[cursor].hash for cursor in range(1, steps + 1)] == expected


def test_a_sleeper_is_left_out_and_comes_back_by_itself(tmp_path: Path, corpus: Path) -> None:
    """SIGSTOP for longer than the time-out: its process still has its sockets and its old state."""
    steps = 400
    plan = plan_of(tmp_path / "site", config(), corpus=corpus, steps=steps, ranks=3,
                   step_seconds=0.02)  # fmt: skip
    with Members(tmp_path / "site", plan) as site:
        site.start(0, 1, 2)
        site.reach(5, 0, 1, 2)
        stopped = time.monotonic()
        site.signal(2, signal.SIGSTOP)
        resumed = site.reach(5, 0, 1)
        # A ping that is on its way is waited for, too; and two cores may be busy.
        assert resumed.at - stopped < 3 * RANK_TIMEOUT
        time.sleep(RANK_TIMEOUT)
        site.signal(2, signal.SIGCONT)
        site.reach(resumed.cursor, 0, 1, 2)
        site.finish()
        site.check(steps)


@pytest.mark.parametrize("inner", [DENSE, SCAPE], ids=["dense", "scape"])
def test_two_die_at_once_and_one_goes_on(
    tmp_path: Path, corpus: Path, inner: dict[str, Any]
) -> None:
    """Without backups SCAPE loses two thirds of its shards, which is counted."""
    steps = 200
    plan = plan_of(tmp_path / "site", config(**inner), corpus=corpus, steps=steps, ranks=3)
    with Members(tmp_path / "site", plan) as site:
        site.start(0, 1, 2)
        site.reach(20, 0, 1, 2)
        killed = site.kill(0, 2)
        alone = site.reach(20, 1)
        assert alone.at - killed < RANK_TIMEOUT + 1.0
        assert alone.lost == (pytest.approx(2 / 3) if inner is SCAPE else 0.0)
        site.finish()
        site.check(steps)


def test_members_that_the_rows_do_not_divide_by_weigh_as_many_as_they_have(
    tmp_path: Path, corpus: Path
) -> None:
    """4 rows on 3 ranks: the step is that of one rank with all rows, but for rounding."""
    steps = 30
    plan = plan_of(tmp_path / "three", config(batch=4, optimizer="sgd"), corpus=corpus,
                   steps=steps, ranks=3)  # fmt: skip
    alone = plan_of(tmp_path / "one", config(batch=4, optimizer="sgd"), corpus=corpus,
                    steps=steps, ranks=1)  # fmt: skip
    with Members(tmp_path / "three", plan) as three, Members(tmp_path / "one", alone) as one:
        three.start(0, 1, 2)
        one.start(0)
        three.finish()
        one.finish()
        ours, theirs = three.parameters(0), one.parameters(0)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=2e-6)


def test_a_lighthouse_that_dies_and_forgets_makes_no_wrong_average(
    tmp_path: Path, corpus: Path
) -> None:
    """Two members, the lighthouse restarts (its quorums begin at 1 again), a third joins."""
    steps = 500
    plan = plan_of(tmp_path / "site", config(), corpus=corpus, steps=steps, ranks=3,
                   step_seconds=0.02)  # fmt: skip
    with Members(tmp_path / "site", plan) as site:
        site.prepare(0, 1, 2)
        site.let_in(0, 1)
        before = site.reach(5, 0, 1)
        site.kill_lighthouse()
        time.sleep(4.0)
        site.start_lighthouse()
        back = time.monotonic()
        site.let_in(2)
        together = site.reach(before.cursor, 0, 1, 2)
        assert together.at - back < 15.0
        site.finish()
        committed = site.check(steps)
    sizes = [(len(members), count) for members, count in site.phases()]
    assert sizes[0][0] == 2
    assert {size for size, _ in sizes} == {2, 3}
    expected = static_hashes(tmp_path, Config.model_validate(plan.config), corpus, sizes, steps)
    assert [committed[cursor].hash for cursor in range(1, steps + 1)] == expected


@pytest.mark.parametrize("inner", [DENSE, SCAPE], ids=["dense", "scape"])
def test_members_1_2_3_2_3_and_every_bit_is_that_of_calm_runs(
    tmp_path: Path, corpus: Path, inner: dict[str, Any]
) -> None:
    """LOCO_MEMBER_STEPS=500 makes the evidence of docs/results/torchft_cpu_2026-11-30.md.

    A line of JSON is added to the file LOCO_MEMBER_RECORD, if one is named.
    """
    steps = int(os.environ.get("LOCO_MEMBER_STEPS", "150"))
    plan = plan_of(tmp_path / "site", config(**inner), corpus=corpus, steps=steps, ranks=3,
                   shard_backup=True, step_seconds=0.03)  # fmt: skip
    few = steps // 10
    with Members(tmp_path / "site", plan) as site:
        site.prepare(0, 1, 2, 1)
        site.let_in(0)
        now = site.reach(few, 0)
        site.let_in(1)
        now = site.reach(now.cursor + few, 0, 1)
        site.let_in(2)
        site.reach(now.cursor + few, 0, 1, 2)
        site.kill(1)
        site.reach(now.cursor + few, 0, 2)
        site.let_in(1)
        site.finish()
        committed = site.check(steps)
        phases = site.phases()
    sizes = [(len(members), count) for members, count in phases]
    assert [size for size, _ in sizes] == [1, 2, 3, 2, 3]
    expected = static_hashes(tmp_path, Config.model_validate(plan.config), corpus, sizes, steps)
    hashes = [committed[cursor].hash for cursor in range(1, steps + 1)]
    assert hashes == expected
    if record := os.environ.get("LOCO_MEMBER_RECORD"):
        found = {
            "inner": inner,
            "steps": steps,
            "phases": phases,
            "static": sizes,
            "load": os.getloadavg(),
        }
        with Path(record).open("a") as lines:
            lines.write(json.dumps({**found, "every_50th_hash": hashes[49::50]}) + "\n")
