"""Ctrl+C at several moments in every program: exit code, no orphan, no port held.

pytest tests/integration/test_interrupt.py
"""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import psutil
import pytest
from support.cluster import Cluster, Process, loco
from support.live import eventually

pytestmark = pytest.mark.slow

ENDLESS = {"run": {"rounds": 100_000}, "quorum": {"min_sites": 1}}


def gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def port_is_free(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, int(port)))
        except OSError:
            return False
    return True


def test_a_worker_while_it_trains_and_the_coordinator_after_it(tmp_path: Path) -> None:
    with Cluster(tmp_path, **ENDLESS) as cluster:
        coordinator = cluster.coordinator()
        paris = cluster.site("paris", ranks=2)
        cluster.reaches(2)
        ranks = paris.descendants()
        assert len(ranks) == 2
        paris.interrupt()
        assert paris.wait(20) == 130, paris.output
        eventually(lambda: gone(ranks), "no rank is left")
        assert "Traceback" not in paris.output
        left = eventually(
            lambda: cluster.status()["sites"][0]["status"] == "left", "the site said goodbye"
        )
        assert left
        coordinator.interrupt()
        assert coordinator.wait(20) == 0, coordinator.output
        assert port_is_free(cluster.address)
        assert "Traceback" not in coordinator.output


def test_a_worker_that_waits_for_its_coordinator(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        paris = cluster.site("paris", ranks=2)
        paris.says("away for")
        ranks = paris.descendants()
        paris.popen.send_signal(signal.SIGTERM)
        assert paris.wait(20) == 130, paris.output
        eventually(lambda: gone(ranks), "no rank is left")
        assert "Traceback" not in paris.output


def test_ranks_die_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with Cluster(tmp_path, **ENDLESS) as cluster:
        cluster.coordinator()
        paris = cluster.site("paris", ranks=2)
        cluster.reaches(1)
        ranks = paris.descendants()
        paris.kill()
        eventually(lambda: gone(ranks), "no rank is left")


def test_a_rank_that_is_killed_ends_its_site(tmp_path: Path) -> None:
    with Cluster(tmp_path, **ENDLESS) as cluster:
        cluster.coordinator()
        paris = cluster.site("paris", ranks=2)
        cluster.reaches(1)
        ranks = paris.descendants()
        ranks[1].kill()
        assert paris.wait(30) == 1, paris.output
        eventually(lambda: gone(ranks), "no rank is left")
        assert "lost another rank" in paris.output or "rank" in paris.output
        assert "Traceback" not in paris.output


@pytest.mark.timeout(400)
@pytest.mark.parametrize("moment", ["at once", "while the sites train"])
def test_the_demo(tmp_path: Path, moment: str) -> None:
    command = loco("demo", "--ranks", "1", "--rounds", "500")
    with Process(tmp_path / "log", command, TMPDIR=str(tmp_path)) as demo:
        eventually(demo.descendants, "the demo has started its coordinator")
        if moment != "at once":
            demo.says(" bpb up", 300)  # the first round is behind it
        children = demo.descendants()
        demo.interrupt()
        assert demo.wait(30) == 130, demo.output
        eventually(lambda: gone(children), "nothing is left")
        assert not list(tmp_path.glob("loco-demo-*"))
        assert "Traceback" not in demo.output
