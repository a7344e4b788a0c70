"""Hosts on one machine: network namespaces on a bridge, every link shaped in both directions.

    with Hosts(4, mbit=1000) as hosts:
        hosts.start(0, ["python", "-m", "something"])   # runs inside host 0, at hosts.address(0)
        hosts.bytes_sent(0)                             # the interface's own counter

Needs root, `ip` and `tc` (Debian: iproute2). Linux's tbf shapes the rate; latency, jitter and loss
it cannot do, and `netem` is missing on many kernels.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from types import TracebackType
from typing import Any

from loco.errors import ConfigError

INTERFACE = "eth0"
BURST_BYTES = 256 * 1024  # above the 64 KiB that segmentation offload hands over at once


class Hosts:
    """`num_hosts` namespaces whose links carry `mbit` Mbit/s each way; None does not shape.

    Names begin with "loco" and this process's id, so that several may exist at once. Leaving the
    context kills what was started in the namespaces and removes them.
    """

    def __init__(self, num_hosts: int, *, mbit: float | None) -> None:
        require_namespaces()
        self.num_hosts = num_hosts
        self.mbit = mbit
        self._prefix = f"loco{os.getpid()}"
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Hosts:
        try:
            _run("ip", "link", "add", self._bridge, "type", "bridge")
            _run("ip", "link", "set", self._bridge, "up")
            for host in range(self.num_hosts):
                self._add(host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def address(self, host: int) -> str:
        """IPv4 address of a host."""
        return f"10.73.{os.getpid() % 256}.{host + 1}"

    def start(self, host: int, command: list[str], **options: Any) -> subprocess.Popen[str]:
        """Start `command` inside a host; options are those of Popen."""
        inside = ["ip", "netns", "exec", self._name(host), *command]
        process = subprocess.Popen(inside, text=True, **options)
        self._processes.append(process)
        return process

    def bytes_sent(self, host: int) -> int:
        """Bytes that left a host's interface, headers included."""
        shown = _run("ip", "-n", self._name(host), "-s", "-j", "link", "show", INTERFACE)
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])

    def close(self) -> None:
        """Kill what was started and remove namespaces and bridge; harmless if repeated."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for host in range(self.num_hosts):
            _run("ip", "netns", "del", self._name(host), check=False)
        _run("ip", "link", "del", self._bridge, check=False)

    @property
    def _bridge(self) -> str:
        return f"{self._prefix}b"

    def _name(self, host: int) -> str:
        return f"{self._prefix}h{host}"

    def _add(self, host: int) -> None:
        name, outside = self._name(host), f"{self._prefix}v{host}"
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", outside, "type", "veth", "peer", INTERFACE, "netns", name)
        _run("ip", "link", "set", outside, "master", self._bridge, "up")
        _run("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", INTERFACE)
        _run("ip", "-n", name, "link", "set", INTERFACE, "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")
        if self.mbit is not None:
            self._shape("-n", name, "qdisc", "add", "dev", INTERFACE)  # what the host sends
            self._shape("qdisc", "add", "dev", outside)  # what it receives

    def _shape(self, *where: str) -> None:
        rate = f"{self.mbit}mbit"
        _run(
            "tc", *where, "root", "tbf", "rate", rate, "burst", str(BURST_BYTES), "latency", "200ms"
        )


def require_namespaces() -> None:
    """Raise ConfigError unless this process may make network namespaces."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} not found; install iproute2")
    if os.geteuid() != 0:
        raise ConfigError("network namespaces need root; run as root, or measure over loopback")


def _run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if check and done.returncode != 0:
        raise ConfigError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
