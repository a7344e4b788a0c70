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
import signal
import subprocess
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, Self

from loco.errors import ConfigError

INTERFACE = "eth0"
BURST_BYTES = 256 * 1024  # above the 64 KiB that segmentation offload hands over at once


class Namespaces(ABC):
    """`num_hosts` hosts of this machine. Names begin with "loco" and this process's id, so that
    several networks may exist at once. Leaving the context kills what was started and removes them.
    """

    def __init__(self, num_hosts: int) -> None:
        require_namespaces()
        self.num_hosts = num_hosts
        self._prefix = f"loco{os.getpid()}"
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:  # whatever ends it: namespaces would outlive this process
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

    @abstractmethod
    def address(self, host: int) -> str:
        """IPv4 address of a host."""

    @abstractmethod
    def _open(self) -> None:
        """Make the hosts and what joins them."""

    def start(self, host: int, command: list[str], **options: Any) -> subprocess.Popen[Any]:
        """Start `command` on a host; options are those of Popen."""
        inside = ["ip", "netns", "exec", self._name(host), *command]
        process = subprocess.Popen(inside, start_new_session=True, **options)
        self._processes.append(process)
        return process

    def close(self) -> None:
        """Kill what was started and remove the hosts; harmless if repeated."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for host in range(self.num_hosts):
            run_tool("ip", "netns", "del", self._name(host), check=False)

    def _name(self, host: int) -> str:
        return f"{self._prefix}h{host}"


class Hosts(Namespaces):
    """Hosts on a bridge whose links carry `mbit` Mbit/s each way; None does not shape."""

    def __init__(self, num_hosts: int, *, mbit: float | None) -> None:
        super().__init__(num_hosts)
        self.mbit = mbit

    def _open(self) -> None:
        run_tool("ip", "link", "add", self._bridge, "type", "bridge")
        run_tool("ip", "link", "set", self._bridge, "up")
        for host in range(self.num_hosts):
            self._add(host)

    def address(self, host: int) -> str:
        """10.73.x.y, where x follows this process's id."""
        return f"10.73.{os.getpid() % 256}.{host + 1}"

    def bytes_sent(self, host: int) -> int:
        """Bytes that left a host's interface, headers included."""
        shown = run_tool("ip", "-n", self._name(host), "-s", "-j", "link", "show", INTERFACE)
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])

    def close(self) -> None:
        """Kill what was started and remove namespaces and bridge; harmless if repeated."""
        super().close()
        run_tool("ip", "link", "del", self._bridge, check=False)

    @property
    def _bridge(self) -> str:
        return f"{self._prefix}b"

    def _add(self, host: int) -> None:
        name, outside = self._name(host), f"{self._prefix}v{host}"
        run_tool("ip", "netns", "add", name)
        run_tool("ip", "link", "add", outside, "type", "veth", "peer", INTERFACE, "netns", name)
        run_tool("ip", "link", "set", outside, "master", self._bridge, "up")
        run_tool("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", INTERFACE)
        run_tool("ip", "-n", name, "link", "set", INTERFACE, "up")
        run_tool("ip", "-n", name, "link", "set", "lo", "up")
        if self.mbit is not None:
            self._shape("-n", name, "qdisc", "add", "dev", INTERFACE)  # what the host sends
            self._shape("qdisc", "add", "dev", outside)  # what it receives

    def _shape(self, *where: str) -> None:
        rate = f"{self.mbit}mbit"
        run_tool(
            "tc", *where, "root", "tbf", "rate", rate, "burst", str(BURST_BYTES), "latency", "200ms"
        )


def require_namespaces() -> None:
    """Raise ConfigError unless this process may make network namespaces."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} not found; install iproute2")
    if os.geteuid() != 0:
        raise ConfigError("network namespaces need root; run as root, or measure over loopback")


def run_tool(*command: str, check: bool = True) -> str:
    """Output of a command; ConfigError with its complaint if it fails and `check` is set."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if check and done.returncode != 0:
        raise ConfigError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
