"""Programs of the operating system that tests need: they fail, and never skip, without them."""

from __future__ import annotations

import shutil

PACKAGES = {
    "chromedriver": "chromium-driver",
    "chromium": "chromium",
    "ip": "iproute2",
    "prometheus": "prometheus",
    "promtool": "prometheus",
}


def program(name: str) -> str:
    """Path of a program, or an AssertionError that says how to get it."""
    path = shutil.which(name)
    assert path, f"{name} is missing: run `make system` as root (Debian package {PACKAGES[name]})"
    return path
