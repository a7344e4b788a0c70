"""A whole site with ranks that die, under a real coordinator that must not notice.

Compares theta digests at coordinator and site, the tokens of all rounds with their number, and the
incarnation, which must stay the first.

    pytest tests/integration/test_ranks_die.py
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.cluster import Cluster, Process, loco, run_loco

pytest.importorskip("torchft", reason="torchft has no wheel for this machine")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS, BATCH, SEQ_LEN, RANKS = 6, 4, 32, 3


def cluster(directory: Path, rounds: int, sync: str = "dense", **changes: Any) -> Cluster:
    inner = {"sync": sync, "steps": STEPS, "max_local_steps": STEPS}
    return Cluster(
        directory,
        run={"rounds": rounds},
        quorum={"min_sites": 1},
        inner=inner,
        **changes,
    )


def ranks_of(site: Process) -> dict[int, psutil.Process]:
    """The living ranks of a site, by slot; 0 leads until it dies."""
    found = {}
    for process in site.descendants():
        if process.cmdline()[1:3] == ["-m", "worker"]:
            found[int(process.environ()["RANK"])] = process
    return found


def start(cluster: Cluster, *arguments: str, coordinator: str | None = None) -> Process:
    command = loco(
        "worker", "--coordinator", coordinator or cluster.address, "--site", "paris",
        "--ranks", str(RANKS), "--threads", "1", "--fault-tolerance", "torchft",
        "--rank-timeout", "2", *arguments,
    )  # fmt: skip
    return cluster.start("paris", command)


def check(status: dict[str, Any], rounds: int, *, incarnation: int = 1) -> None:
    """No round lost, no sample counted twice or left out, theta everyone's."""
    (site,) = status["sites"]
    assert status["round"] == rounds
    assert site["theta_digest"] == status["theta_digest"]
    assert site["rounds_included"] == rounds
    assert site["tokens"] == rounds * STEPS * BATCH * SEQ_LEN
    assert site["incarnation"] == incarnation


def test_the_leader_dies_and_another_and_no_round_is_lost(tmp_path: Path) -> None:
    rounds = 60
    with cluster(tmp_path, rounds, "scape") as run:
        run.coordinator()
        site = start(run, "--shard-backup")
        run.reaches(5)
        ranks_of(site)[0].kill()
        site.says("going on as rank 0 of 1, 2\n")
        run.reaches(run.status()["round"] + 2)
        ranks_of(site)[2].kill()
        assert run.status()["sites"][0]["members"] > 0
        status = run.finish(site)
    check(status, rounds)
    assert "starting it again" in site.output
    assert "lost and count as zero" not in site.output
    assert "torchft::" not in site.output, "Rust's log of each quorum"


def test_all_die_at_once_and_the_site_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    rounds = 40
    with cluster(tmp_path, rounds) as run:
        run.coordinator()
        site = start(run, "--checkpoint", str(tmp_path / "ck"), "--checkpoint-every-rounds", "2")
        run.reaches(6)
        for process in ranks_of(site).values():
            process.send_signal(signal.SIGKILL)
        status = run.finish(site)
    assert "going on from the checkpoint of round" in site.output
    check(status, rounds, incarnation=2)


def test_two_of_three_die_while_the_run_is_paused_and_are_back_before_it_goes_on(
    tmp_path: Path,
) -> None:
    """The survivor makes no step then; once those who came back entered the run in its place."""
    rounds = 30
    with cluster(tmp_path, rounds) as run:
        run.coordinator()
        site = start(run)
        run.reaches(3)
        assert run_loco("control", run.address, "pause").returncode == 0
        time.sleep(3.0)  # longer than a round: the site waits
        ranks = ranks_of(site)
        for slot in (0, 2):
            ranks[slot].kill()
        site.says("going on as rank 0 of 1\n")
        site.says("going on as rank 2 of 1, ")
        assert run.status()["round"] < rounds
        assert run_loco("control", run.address, "resume").returncode == 0
        status = run.finish(site)
    check(status, rounds)


def test_ctrl_c_ends_all_ranks_and_the_site_says_goodbye(tmp_path: Path) -> None:
    with cluster(tmp_path, rounds=1000) as run:
        run.coordinator()
        site = start(run)
        run.reaches(2)
        ranks = ranks_of(site)
        site.interrupt()
        assert site.wait(30) == 130, site.output
        assert "Traceback" not in site.output
        assert not any(process.is_running() for process in ranks.values())
        (told,) = run.status()["sites"]
        assert told["status"] == "left"


HIDES_TORCHFT = """
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "torchft" else find_spec(name, *a)
"""


def test_without_torchft_one_line_and_a_static_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on aarch64 and Python 3.14, where there is no wheel."""
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide" / "sitecustomize.py").write_text(HIDES_TORCHFT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "hide"), prepend=":")
    with cluster(tmp_path, rounds=3) as run:
        run.coordinator()
        command = loco(
            "worker", "--coordinator", run.address, "--site", "paris", "--ranks", "2",
            "--threads", "1", "--fault-tolerance", "torchft",
        )  # fmt: skip
        site = run.start("paris", command)
        status = run.finish(site)
    assert site.output.count("torchft is not installed here") == 1
    (told,) = status["sites"]
    assert (told["ranks"], told["members"]) == (2, 0)
    assert told["theta_digest"] == status["theta_digest"]
