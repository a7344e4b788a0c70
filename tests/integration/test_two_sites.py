"""Whole runs with real processes: what a user starts, and what must come out of it.

Compares theta digests of the coordinator and all sites, of repeated runs, of runs that lost their
coordinator with runs that did not, of `loco worker` with torchrun.

    pytest tests/integration/test_two_sites.py
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from support.cluster import Cluster, Process, last_json, loco, run_loco

from coordinator.recovery import recover
from coordinator.store import Store
from loco.export import load_exported
from loco.model import layout_of, pack

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """An uninterrupted run of two sites, paris with two ranks: its state and theta's digest."""
    directory = tmp_path_factory.mktemp("plain")
    with Cluster(directory) as cluster:
        coordinator = cluster.coordinator()
        paris, oslo = cluster.site("paris", ranks=2), cluster.site("oslo")
        status = cluster.finish(paris, oslo)
        assert status["phase"] == "finished"
        assert status["round"] == 3
        for site in status["sites"]:
            assert site["theta_digest"] == status["theta_digest"]
            assert site["rounds_included"] == 3
            assert site["tokens"] == 3 * 3 * 4 * 32
            assert site["status"] == "left"
            assert site["bytes_up"] > 0
        assert [v["round"] for v in status["validation"]] == [0, 2, 3]
        assert status["validation"][0]["bits_per_byte"] == pytest.approx(8.0, abs=0.2)
        assert status["validation"][-1]["bits_per_byte"] < 7.7
        coordinator.popen.send_signal(signal.SIGTERM)
        assert coordinator.wait() == 0, coordinator.output
    return cluster.state, status["theta_digest"]


def test_the_same_seed_gives_the_same_theta_also_under_torchrun(
    tmp_path: Path, plain: tuple[Path, str]
) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.coordinator()
        torchrun = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "-m", "worker", "--coordinator", cluster.address, "--site", "paris", "--threads", "1",
        ]  # fmt: skip
        paris = cluster.start("paris", torchrun, GLOO_SOCKET_IFNAME="lo")
        status = cluster.finish(paris, cluster.site("oslo"))
    assert status["theta_digest"] == plain[1]


def test_another_seed_gives_another_theta(tmp_path: Path, plain: tuple[Path, str]) -> None:
    with Cluster(tmp_path, run={"rounds": 1, "seed": 2}, quorum={"min_sites": 1}) as cluster:
        cluster.coordinator()
        status = cluster.finish(cluster.site("paris"))
    assert status["theta_digest"] != plain[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_coordinator_that_was_away_changes_nothing(
    tmp_path: Path, plain: tuple[Path, str], number: signal.Signals
) -> None:
    with Cluster(tmp_path) as cluster:
        first = cluster.coordinator()
        paris, oslo = cluster.site("paris", ranks=2), cluster.site("oslo")
        cluster.reaches(1)
        first.popen.send_signal(number)
        assert first.wait() == (0 if number == signal.SIGTERM else -signal.SIGKILL)
        cluster.coordinator()
        status = cluster.finish(paris, oslo)
    assert status["theta_digest"] == plain[1]
    assert {site["incarnation"] for site in status["sites"]} == {1}


def test_the_export_holds_theta(tmp_path: Path, plain: tuple[Path, str]) -> None:
    state, digest = plain
    done = run_loco("export", "--state", str(state), "--out", str(tmp_path / "model"))
    assert done.returncode == 0, done.stderr
    model = load_exported(tmp_path / "model")
    store = Store.open(state)
    try:
        run, reducer = recover(store)
        assert run.theta_digest == digest
        np.testing.assert_array_equal(pack(model, layout_of(model)), reducer.theta)
    finally:
        store.close()


def test_the_state_directory_passes_its_check(plain: tuple[Path, str]) -> None:
    done = run_loco("state", "check", str(plain[0]), "--json")
    assert done.returncode == 0, done.stdout
    verdict = json.loads(done.stdout)
    assert verdict["faults"] == []
    assert verdict["theta_digest"] == plain[1]


def test_scape_inside_the_sites(tmp_path: Path) -> None:
    with Cluster(tmp_path, inner={"sync": "scape", "density": 0.25}) as cluster:
        cluster.coordinator()
        status = cluster.finish(cluster.site("paris", ranks=2), cluster.site("oslo"))
    assert {s["theta_digest"] for s in status["sites"]} == {status["theta_digest"]}
    assert status["validation"][-1]["bits_per_byte"] < status["validation"][0]["bits_per_byte"]


def test_init_then_coordinator_from_the_preset(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    assert run_loco("init", str(config), "--preset", "tiny").returncode == 0
    again = run_loco("init", str(config))
    assert again.returncode == 2
    assert str(config) in again.stderr
    command = loco("coordinator", str(config), "--state", str(tmp_path / "s"), "--listen",
                   "127.0.0.1:0")  # fmt: skip
    with Process(tmp_path / "log", command) as coordinator:
        coordinator.says("listening on 127.0.0.1:")
        address = (tmp_path / "s" / "address").read_text()
        status = run_loco("status", address, "--json")
        document = json.loads(status.stdout)
        assert document["phase"] == "gathering"
        assert "2 sites" in document["waiting_for"]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("algorithm", ["sparseloco", "diloco", "ddp"])
def test_demo_json(tmp_path: Path, algorithm: str) -> None:
    command = loco("demo", "--algorithm", algorithm, "--rounds", "1", "--ranks", "1", "--json")
    with Process(tmp_path / "log", command, TMPDIR=str(tmp_path)) as demo:
        assert demo.wait(300) == 0, demo.output
        result = last_json(demo)
    for key in (
        "params", "rounds", "inner_steps", "val_bpb_start", "val_bpb_end", "dense_bytes_per_round",
        "sites", "theta_digest", "bits_per_value_up", "seconds",
    ):  # fmt: skip
        assert key in result, key
    assert result["rounds"] == 1
    assert len(result["sites"]) == (1 if algorithm == "ddp" else 2)
    for site in result["sites"]:
        for key in ("name", "ranks", "tokens", "bytes_up", "bytes_down", "theta_digest"):
            assert key in site, key
        assert site["theta_digest"] == result["theta_digest"]
    assert result["val_bpb_end"] < result["val_bpb_start"]
    assert result["dense_bytes_per_round"] == 4 * result["params"]
    assert not list(tmp_path.glob("loco-demo-*")), os.listdir(tmp_path)
