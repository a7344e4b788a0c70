"""The suite itself: a test that fails takes nothing else along.

Compared with: pytest in a process of its own, on tests of which the first leaves a coordinator.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

COORDINATOR = """
from support.live import Coordinator, left_running
from support.one_site import config_of_run, create


def test_fails(tmp_path):
    Coordinator(create(tmp_path / "state", config_of_run()))
    raise AssertionError("in its middle")


def test_after_it():
    assert not left_running
"""
THREAD = """
import threading
import time

import conftest


def test_leaves_a_thread():
    conftest.END_SECONDS = 1.0
    threading.Thread(target=time.sleep, args=(600,), name="left behind").start()
"""


def run(tests: str, directory: Path) -> subprocess.CompletedProcess[str]:
    (directory / "test_inner.py").write_text(tests)
    config = ("-c", str(ROOT / "pyproject.toml"), "test_inner.py")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", *config],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=50,  # less than conftest's END_SECONDS
    )


def test_a_coordinator_that_a_failed_test_left_is_stopped_and_pytest_ends(tmp_path: Path) -> None:
    done = run(COORDINATOR, tmp_path)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 1


def test_a_thread_that_goes_on_is_shown_and_ended_and_that_is_a_failure(tmp_path: Path) -> None:
    done = run(THREAD, tmp_path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert "Timeout (0:00:01)!" in done.stderr
    assert "threading.py" in done.stderr
    assert done.returncode == 1
