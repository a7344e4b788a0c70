"""A wide-area network on one machine: rate, delay and loss, without netem.

    with Wan(3, mbit=100, rtt_ms=50) as wan:
        wan.start(0, ["python", "-m", "something"])   # on host 0, at wan.address(0)

Every host is a network namespace whose only card is a TUN device. One process reads the packets of
all of them, holds each as long as the line would, and hands it on: a packet leaves when the link of
its sender is free, arrives half a round trip later, and takes its turn on the link of its receiver.
A queue that would hold more than `QUEUE_SECONDS` drops, as a router does. Needs root.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.netns import INTERFACE, Namespaces, run_tool

QUEUE_SECONDS = 0.25
TUN_QUEUE_PACKETS = 4000
PRIORITY = 30  # real-time: a line does not wait for its hosts' processors, also under `chrt -r 20`
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x1001


class Wan(Namespaces):
    """Hosts whose links carry `mbit` Mbit/s each way; any two are `rtt_ms` milliseconds apart.

    `loss` is the share of packets that the line drops, in [0, 1); `mtu` is in bytes; `congestion`
    is TCP's congestion control (the machine's if None), one of its tcp_allowed_congestion_control.
    """

    def __init__(
        self,
        num_hosts: int,
        *,
        mbit: float,
        rtt_ms: float,
        loss: float = 0.0,
        mtu: int = 1500,
        congestion: str | None = None,
    ) -> None:
        super().__init__(num_hosts)
        self._line = [f"--mbit={mbit}", f"--rtt-ms={rtt_ms}", f"--loss={loss}"]
        self._mtu = mtu
        self._congestion = congestion
        self._emulator: subprocess.Popen[Any] | None = None

    def address(self, host: int) -> str:
        """10.74.0.y; the last byte is what the emulator switches by."""
        return f"10.74.0.{host + 1}"

    def _open(self) -> None:
        names = [self._name(host) for host in range(self.num_hosts)]
        for name in names:
            run_tool("ip", "netns", "add", name)
        self._emulator = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.tun", *self._line, *names],
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        os.sched_setscheduler(self._emulator.pid, os.SCHED_RR, os.sched_param(PRIORITY))
        assert self._emulator.stdout is not None
        if not self._emulator.stdout.readline():  # it says when the cards exist
            raise RuntimeError("the emulator of the network ended at once")
        for host in range(self.num_hosts):
            self._configure(host)

    def black_hole(self, seconds: float) -> None:
        """Swallow every packet for so long."""
        assert self._emulator is not None
        self._emulator.send_signal(signal.SIGUSR1)
        time.sleep(seconds)
        self._emulator.send_signal(signal.SIGUSR2)

    def close(self) -> None:
        """Kill what was started, then the emulator; remove the hosts. Harmless if repeated."""
        super().close()
        if self._emulator is not None:
            self._emulator.kill()
            self._emulator.wait()

    def _configure(self, host: int) -> None:
        name = self._name(host)
        address = f"{self.address(host)}/24"
        run_tool("ip", "-n", name, "addr", "add", address, "dev", INTERFACE)
        run_tool(
            "ip", "-n", name, "link", "set", INTERFACE, "mtu", str(self._mtu),
            "txqueuelen", str(TUN_QUEUE_PACKETS), "up",
        )  # fmt: skip
        run_tool("ip", "-n", name, "link", "set", "lo", "up")
        if self._congestion is not None:
            setting = f"net.ipv4.tcp_congestion_control={self._congestion}"
            run_tool("ip", "netns", "exec", name, "sysctl", "--quiet", "--write", setting)


# --- the emulator's process -----------------------------------------------------------------------


@dataclass
class _Link:
    """One host's line; the times are those at which it is free again."""

    fd: int
    up_free: float = 0.0
    down_free: float = 0.0


@dataclass
class _Line:
    """The packets on their way."""

    links: list[_Link]
    seconds_a_byte: float
    one_way_seconds: float
    loss: float
    swallows: bool = False
    random: random.Random = field(default_factory=lambda: random.Random(0))
    flying: list[tuple[float, int, int, bytes]] = field(default_factory=list)
    order: itertools.count[int] = field(default_factory=itertools.count)

    def take(self, source: int, packet: bytes, now: float) -> None:
        """A packet has left a host."""
        target = packet[19] - 1  # last byte of IPv4's destination
        if packet[0] >> 4 != 4 or not 0 <= target < len(self.links):
            return  # IPv6's own chatter
        seconds = len(packet) * self.seconds_a_byte
        sender, receiver = self.links[source], self.links[target]
        sent = max(now, sender.up_free) + seconds
        here = max(sent + self.one_way_seconds, receiver.down_free + seconds)
        backlog = max(sent - now, here - sent - self.one_way_seconds)
        if self.swallows or backlog > QUEUE_SECONDS or self.random.random() < self.loss:
            return
        sender.up_free, receiver.down_free = sent, here
        heapq.heappush(self.flying, (here, next(self.order), target, packet))

    def deliver(self, now: float) -> float:
        """Hand over what has arrived; seconds until the next packet does."""
        while self.flying and self.flying[0][0] <= now:
            _, _, target, packet = heapq.heappop(self.flying)
            try:
                os.write(self.links[target].fd, packet)
            except OSError:
                continue  # the host's queue is full or its card is down: the packet is lost
        return max(0.0, self.flying[0][0] - now) if self.flying else 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description="the emulator; started by Wan")
    parser.add_argument("--mbit", type=float, required=True)
    parser.add_argument("--rtt-ms", type=float, required=True)
    parser.add_argument("--loss", type=float, required=True)
    parser.add_argument("namespaces", nargs="+")
    args = parser.parse_args()
    line = _Line(
        links=[_Link(_open_card(name)) for name in args.namespaces],
        seconds_a_byte=8 / (args.mbit * 1e6),
        one_way_seconds=args.rtt_ms / 2e3,
        loss=args.loss,
    )
    signal.signal(signal.SIGUSR1, lambda *_: setattr(line, "swallows", True))
    signal.signal(signal.SIGUSR2, lambda *_: setattr(line, "swallows", False))
    print("ready", flush=True)
    carry(line)


def carry(line: _Line) -> None:
    """Read, hold, hand on, for ever."""
    hosts = {link.fd: host for host, link in enumerate(line.links)}
    pause = 1.0
    while True:
        ready, _, _ = select.select(list(hosts), [], [], pause)
        for fd in ready:
            for _ in range(64):  # then another card has its turn
                try:
                    packet = os.read(fd, 65536)
                except BlockingIOError:
                    break
                line.take(hosts[fd], packet, time.monotonic())
        pause = line.deliver(time.monotonic())


def _open_card(namespace: str) -> int:
    """A TUN device in a namespace, which this process enters for it."""
    libc = ctypes.CDLL(None, use_errno=True)
    inside = os.open(Path("/run/netns") / namespace, os.O_RDONLY)
    if libc.setns(inside, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns {namespace}")
    os.close(inside)
    card = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", INTERFACE.encode(), _IFF_TUN_NO_PI)
    fcntl.ioctl(card, _TUNSETIFF, request)
    return card


if __name__ == "__main__":
    main()
