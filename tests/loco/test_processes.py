"""Child processes: none outlives its parent, and stopping takes bounded time.

Compared with: the operating system's process table. Run alone: pytest tests/loco/test_processes.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from loco.processes import spawn, stop_all

CHILD = """
import os, sys, time
from loco.processes import die_with_parent
die_with_parent()
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(600)
"""
PARENT = """
import sys, time
from loco.processes import spawn
spawn([sys.executable, "-c", sys.argv[1], sys.argv[2]])
time.sleep(600)
"""
STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").write("ready")
time.sleep(600)
"""
RANK = """
import sys, time
import torch
import torch.distributed as dist
from loco.errors import UnreachableError
from loco.processes import end_with
rank, meet, ends = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + meet, rank=rank, world_size=2)
if rank == 0:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    print("in flight")
end_with(lambda: exec(ends))
"""


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def written(path: Path) -> bool:
    return path.exists() and path.read_text() != ""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_dies_with_its_parent(tmp_path: Path, number: signal.Signals) -> None:
    told = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD, str(told)])
    wait_for(lambda: written(told))
    child = psutil.Process(int(told.read_text()))
    parent.send_signal(number)
    parent.wait()
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_a_child_whose_parent_is_gone_already_does_not_start(tmp_path: Path) -> None:
    environment = {**os.environ, "LOCO_PARENT_PID": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "pid")],
        env=environment,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert not (tmp_path / "pid").exists()


def test_one_that_ignores_the_request_is_killed_after_the_grace(tmp_path: Path) -> None:
    told = tmp_path / "ready"
    stubborn = spawn([sys.executable, "-c", STUBBORN, str(told)])
    polite = spawn([sys.executable, "-c", "import time; time.sleep(600)"])
    wait_for(lambda: written(told))
    stop_all([stubborn, polite], grace_seconds=0.5)
    assert stubborn.poll() == -signal.SIGKILL
    assert polite.poll() == -signal.SIGTERM


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ("pass", 0),
        ("raise KeyboardInterrupt", 130),
        ("raise UnreachableError('nobody there')", 4),
        ("sys.exit(3)", 3),
    ],
)
def test_a_rank_ends_with_its_code_whatever_its_peer_does(
    tmp_path: Path, ends: str, code: int
) -> None:
    """The collective would be waited for until its time-out of half an hour."""
    meet = str(tmp_path / "meet")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    peer = subprocess.Popen(
        [sys.executable, "-c", RANK, "1", meet, "time.sleep(600)"], env=environment
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", RANK, "0", meet, ends],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    finally:
        peer.kill()
        peer.wait()
    assert done.returncode == code, done.stderr
    assert "in flight" in done.stdout
    assert "Traceback" not in done.stderr
    assert "terminate called" not in done.stderr


def test_what_has_ended_is_left_alone() -> None:
    done = spawn([sys.executable, "-c", "pass"])
    done.wait()
    stop_all([done])
    assert done.returncode == 0
