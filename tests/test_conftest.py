"""The suite itself: a test that fails takes nothing else along.

Compared with: pytest in a process of its own, on tests of which the first leaves a coordinator.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

LEAVES_ONE = """
from support.live import Coordinator, left_running
from support.one_site import config_of_run, create


def test_fails(tmp_path):
    Coordinator(create(tmp_path / "state", config_of_run()))
    raise AssertionError("in its middle")


def test_after_it():
    assert not left_running
"""


def test_a_coordinator_that_a_failed_test_left_is_stopped_and_pytest_ends(tmp_path: Path) -> None:
    (tmp_path / "test_leaves_one.py").write_text(LEAVES_ONE)
    config = ("-c", str(ROOT / "pyproject.toml"), "test_leaves_one.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", *config],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=50,  # less than conftest's END_SECONDS
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 1
