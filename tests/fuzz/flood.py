"""What a flood of bad clients costs good sites: time of a round, and CPU of the coordinator.

    python -m tests.fuzz.flood --seconds 25 --repeats 2 --json

Two good sites go through rounds of about a second, over mutual TLS. In turn nobody disturbs them,
strangers without a certificate open connections, a member asks far above its limit, and a member
begins uploads that no round knows. Attackers are processes of their own, at the lowest priority: on
a machine with few cores they would else take the sites' CPU, which at a distance they cannot.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import loco  # noqa: F401 - before gRPC, which it configures

sys.path.insert(0, str(Path(__file__).parents[1]))

import grpc
import psutil
from fuzz.fuzz_wire import CONFIG, GOOD, GoodSite, coordinator
from support.certs import Certs, channel

from loco.config import LimitsConfig
from loco.wire.blocks import make_block
from loco.wire.protocol import PROTOCOL_VERSION
from loco.wire.v1 import coordinator_pb2 as pb
from loco.wire.v1 import coordinator_pb2_grpc as pb_grpc

STREAMS = 8
KINDS = ("nobody", "strangers", "requests", "pushes")
RATES = {"strangers": 300.0, "requests": 2000.0, "pushes": 2000.0}  # a second, as far as they get


@dataclass
class Phase:
    """One stretch of time."""

    kind: str
    rounds: int
    median_round_seconds: float
    attacks_per_second: float
    coordinator_cpu: float
    """Seconds of CPU a second."""


# --- attackers ------------------------------------------------------------------------------------


def paced(rate: float, seconds: float, act: Callable[[], None]) -> int:
    """Act `rate` times a second, or as often as it goes; how often that was."""
    began, done = time.monotonic(), 0
    while (elapsed := time.monotonic() - began) < seconds:
        if done < rate * elapsed:
            act()
            done += 1
        else:
            time.sleep(0.001)
    return done


def strangers(address: str, bundle: Path, rate: float, seconds: float) -> int:
    """Handshakes without a certificate."""
    context = ssl.create_default_context(cafile=str(bundle.with_name("ca.pem")))
    context.set_alpn_protocols(["h2"])
    host, port = address.split(":")

    def knock() -> None:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host, int(port)), 5.0) as raw,
            context.wrap_socket(raw, server_hostname=host) as connection,
        ):
            connection.recv(1)

    return paced(rate, seconds, knock)


def requests(address: str, bundle: Path, rate: float, seconds: float) -> int:
    """Calls of a member, most of them refused by its rate."""
    with channel(address, bundle) as connection:
        stub = pb_grpc.CoordinatorServiceStub(connection)
        request = pb.StatusRequest(protocol_version=PROTOCOL_VERSION)

        def ask() -> None:
            with contextlib.suppress(grpc.RpcError):
                stub.Status(request, timeout=5.0)

        return paced(rate, seconds, ask)


def pushes(address: str, bundle: Path, rate: float, seconds: float) -> int:
    """Streams of one-byte blocks behind headers that no round knows, again and again."""
    sent = [0] * STREAMS
    until = time.monotonic() + seconds

    def drip(index: int, stub: pb_grpc.CoordinatorServiceStub) -> None:
        def messages() -> Iterator[pb.PushRequest]:
            yield pb.PushRequest(header=pb.PushHeader(caller=pb.Caller(site="mallory")))
            while time.monotonic() < until:
                sent[index] += 1
                yield pb.PushRequest(block=make_block(b"x"))
                time.sleep(STREAMS / rate)

        while time.monotonic() < until:
            with contextlib.suppress(grpc.RpcError):
                stub.Push(messages(), timeout=seconds)

    with channel(address, bundle) as connection:
        stub = pb_grpc.CoordinatorServiceStub(connection)
        threads = [threading.Thread(target=drip, args=(i, stub)) for i in range(STREAMS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return sum(sent)


ATTACKS = {"strangers": strangers, "requests": requests, "pushes": pushes}


def attack(kind: str, address: str, bundle: Path, seconds: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.fuzz.flood", "--attack", kind, "--address", address]
    where = ["--bundle", str(bundle), "--seconds", str(seconds)]
    return subprocess.Popen([*command, *where], stdout=subprocess.PIPE)


# --- measuring ------------------------------------------------------------------------------------


def phase(
    kind: str, seconds: float, address: str, certs: Certs, process: psutil.Process, site: GoodSite
) -> Phase:
    attacker = None if kind == "nobody" else attack(kind, address, certs.bundle("mallory"), seconds)
    if attacker is not None:
        time.sleep(1.0)  # it starts
    cpu, began, round_ = process.cpu_times(), time.monotonic(), site.site.round
    times, last = [], began
    while time.monotonic() - began < seconds - 2.0:
        if site.site.round != round_:
            now = time.monotonic()
            times.append(now - last)
            last, round_ = now, site.site.round
        time.sleep(0.005)
    elapsed, after = time.monotonic() - began, process.cpu_times()
    used = after.user + after.system - cpu.user - cpu.system
    done = 0
    if attacker is not None:
        assert attacker.stdout is not None
        done = int(attacker.stdout.read())
        attacker.wait()
    return Phase(
        kind=kind,
        rounds=len(times),
        median_round_seconds=round(statistics.median(times[1:]), 4),
        attacks_per_second=round(done / seconds, 1),
        coordinator_cpu=round(used / elapsed, 3),
    )


def measure(directory: Path, seconds: float, repeats: int) -> list[Phase]:
    certs = Certs(directory / "certs")
    CONFIG["limits"] = LimitsConfig().model_dump()  # those of every run
    with coordinator(directory, certs) as (address, process):
        sites = [GoodSite(address, name, certs) for name in GOOD]
        time.sleep(5.0)
        found = [
            phase(kind, seconds, address, certs, process, sites[0])
            for _ in range(repeats)
            for kind in KINDS
        ]
        for site in sites:
            site.stop()
            assert site.error is None, site.error
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=25.0, help="a phase")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one JSON array at the end")
    parser.add_argument("--attack", choices=ATTACKS, help="be an attacker, of --address")
    parser.add_argument("--address", default="")
    parser.add_argument("--bundle", type=Path, default=Path())
    options = parser.parse_args()
    if options.attack:
        os.nice(19)
        act: Any = ATTACKS[options.attack]
        print(act(options.address, options.bundle, RATES[options.attack], options.seconds))
        return
    with tempfile.TemporaryDirectory(prefix="loco-flood-") as directory:
        found = measure(Path(directory), options.seconds, options.repeats)
    for entry in found:
        print(entry)
    if options.json:
        print(json.dumps([asdict(entry) for entry in found]))


if __name__ == "__main__":
    main()
