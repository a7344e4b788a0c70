"""Two hosts of our own: network namespaces joined by a pair of virtual cards that count bytes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.programs import program

_CLONE_NEWNET = 0x40000000
HUB, FAR = "10.99.0.1", "10.99.0.2"  # addresses inside the namespaces only


@dataclass(frozen=True)
class Far:
    """The other host, seen from the hub."""

    name: str

    def command(self, *arguments: str) -> list[str]:
        """A command line that runs there."""
        return [program("ip"), "netns", "exec", self.name, *arguments]


def card_bytes(direction: str) -> int:
    """What the hub's card has received (`rx`) or sent (`tx`), headers included."""
    counter = Path(f"/sys/class/net/wan/statistics/{direction}_bytes")
    # /sys shows the namespace of whoever mounted it; a shell of its own mounts it anew.
    script = f"mount -t sysfs sysfs /sys && cat {counter}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@contextlib.contextmanager
def two_hosts() -> Iterator[Far]:
    """Move this thread, and what it starts, into a hub of its own; a far host is one cable away."""
    far = Far(f"loco-far-{os.getpid()}")
    hub = f"loco-hub-{os.getpid()}"
    before = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        for name in (hub, far.name):
            _ip("netns", "add", name)
        _ip("link", "add", "wan", "netns", hub, "type", "veth", "peer", "wan", "netns", far.name)
        for name, address in ((hub, HUB), (far.name, FAR)):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "wan")
            for card in ("lo", "wan"):
                _ip("-n", name, "link", "set", card, "up")
        _enter(f"/run/netns/{hub}")
        yield far
    finally:
        _set_namespace(before)
        os.close(before)
        for name in (hub, far.name):
            subprocess.run([program("ip"), "netns", "delete", name], check=False)


def _ip(*arguments: str) -> None:
    subprocess.run([program("ip"), *arguments], check=True)


def _enter(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        _set_namespace(fd)
    finally:
        os.close(fd)


def _set_namespace(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
