"""How many CPUs this process may use, which in a container or a job are fewer than there are."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def usable_cpus(
    mounted: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int:
    """At least 1: those of the affinity mask (taskset, Slurm, cpusets), and no more whole ones than
    the CPU quota of a control group allows (containers). `mounted` is where control groups are
    mounted, `membership` tells those of this process.
    """
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:  # not Linux
        allowed = os.cpu_count() or 1
    return max(1, int(min([allowed, *_quotas(mounted, membership)])))


def _quotas(mounted: Path, membership: Path) -> Iterator[float]:
    """CPUs by the quota of each control group that this process is in, versions 1 and 2."""
    with contextlib.suppress(OSError):  # not Linux, or no control groups
        for line in membership.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                top = mounted
            elif "cpu" in controllers.split(","):
                top = mounted / "cpu"
            else:
                continue
            # Within a container the path may be the host's, and not to be seen: the top is its own.
            own = top / path.lstrip("/")
            for group in (own, *own.parents):
                if group.is_relative_to(top):
                    yield from _quota(group)


def _quota(group: Path) -> Iterator[float]:
    with contextlib.suppress(OSError, ValueError):  # no limit here: no file, -1 or "max"
        if (group / "cpu.max").exists():
            quota, period = map(int, (group / "cpu.max").read_text().split())
        else:
            quota = int((group / "cpu.cfs_quota_us").read_text())
            period = int((group / "cpu.cfs_period_us").read_text())
        if quota > 0:
            yield quota / period
