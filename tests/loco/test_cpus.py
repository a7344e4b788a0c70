"""CPUs that a process may use: compared with the affinity mask that taskset's call sets, and with
quotas in the files of control groups of both versions, as containers have them.

Run alone: pytest tests/loco/test_cpus.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loco.cpus import usable_cpus

ALL = len(os.sched_getaffinity(0))


def written(root: Path, files: dict[str, str], membership: str) -> tuple[Path, Path]:
    for name, text in files.items():
        path = root / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    root.mkdir(exist_ok=True)
    (root / "membership").write_text(membership)
    return root / "cgroup", root / "membership"


def test_the_affinity_mask_counts_and_not_the_machine(tmp_path: Path) -> None:
    one = min(os.sched_getaffinity(0))
    program = (
        f"import os, pathlib; os.sched_setaffinity(0, {{{one}}})\n"
        "from loco.cpus import usable_cpus\n"
        "print(usable_cpus(pathlib.Path('/nowhere')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"1\n"
    assert usable_cpus(tmp_path, tmp_path / "none") == ALL


@pytest.mark.parametrize("period", [100_000, 50_000])
@pytest.mark.parametrize(
    ("cpus", "expected"), [(0.5, 1), (1.0, 1), (1.99, 1), (1e3, ALL), (None, ALL)]
)
def test_a_quota_counts_in_whole_cpus(
    cpus: float | None, expected: int, period: int, tmp_path: Path
) -> None:
    quota = None if cpus is None else int(cpus * period)
    second = {"job/cpu.max": f"{'max' if quota is None else quota} {period}\n"}
    assert usable_cpus(*written(tmp_path / "v2", second, "0::/job\n")) == expected
    first = {
        "cpu/job/cpu.cfs_quota_us": f"{-1 if quota is None else quota}\n",
        "cpu/job/cpu.cfs_period_us": f"{period}\n",
    }
    ours = written(tmp_path / "v1", first, "9:memory:/job\n3:cpuset:/\n1:cpu,cpuacct:/job\n0::/\n")
    assert usable_cpus(*ours) == expected


def test_the_least_quota_of_all_groups_above_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)))
    files = {
        "cpu.max": "max 100000\n",
        "a/cpu.max": "300000 100000\n",
        "a/b/cpu.max": "800000 100000\n",
    }
    assert usable_cpus(*written(tmp_path / "nested", files, "0::/a/b\n")) == 3
    # In a container: its own group lies at the top, and the path is one of the host.
    own = {"cpu.max": "250000 100000\n"}
    assert usable_cpus(*written(tmp_path / "container", own, "0::/kubepods/pod1/c1\n")) == 2
    assert usable_cpus(*written(tmp_path / "open", {}, "0::/\n")) == 16
