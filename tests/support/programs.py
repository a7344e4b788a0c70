"""Programs of the operating system that tests need: they fail, and never skip, without them."""

from __future__ import annotations

import shutil

PACKAGES = {
    "chromedriver": "chromium-driver",
    "chromium": "chromium",
    "ip": "iproute2",
    "nft": "nftables",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "munged": "munge",
    "sbatch": "slurm-client",
    "scancel": "slurm-client",
    "scontrol": "slurm-client",
    "sinfo": "slurm-client",
    "squeue": "slurm-client",
    "shellcheck": "shellcheck",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "systemd-analyze": "systemd",
}


def program(name: str) -> str:
    """Path of a program, or an AssertionError that says how to get it."""
    path = shutil.which(name)
    assert path, f"{name} is missing: run `make system` as root (Debian package {PACKAGES[name]})"
    return path
