"""The packet filter of deploy/nftables, loaded into the kernel in front of a real coordinator.

A stranger on another (virtual) host takes every connection that the coordinator grants. Compared
with: the same scene without the filter, in which a good peer at another address is kept out. The
file's numbers are made small for the test, and nothing else of it. Run alone (as root):
pytest tests/deploy/test_nftables.py
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tomli_w
from support.cluster import TINY, Process, loco
from support.namespaces import FAR, HUB, Far, two_hosts
from support.programs import program

from coordinator.door import MOST_CONNECTIONS

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "nftables" / "loco.nft"
GOOD, GOOD6, BAD6, HUB6 = "10.99.0.3", "fd99:0:0:2::1", "fd99::1", "fd99:0:0:1::1"
TOTAL, HELD, BURST = 24, 8, 12
PORT, PAGE = 29400, 9400
STRANGER = """
import socket, sys, time
source, target, port, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
held = []
for _ in range(count):
    try:
        held.append(socket.create_connection((target, port), 0.3, (source, 0)))
    except OSError:
        pass
print(len(held), flush=True)
sys.stdin.read()
"""


def rules(*, held: int, burst: int) -> str:
    """The shipped file with other numbers."""
    text = RULES.read_text()
    assert text.count("ct count over 600") == text.count("burst 600 packets") == 2
    return text.replace("ct count over 600", f"ct count over {held}").replace(
        "burst 600 packets", f"burst {burst} packets"
    )


def load(text: str) -> None:
    subprocess.run([program("nft"), "-f", "-"], input=text, text=True, check=True)


def counter(name: str) -> int:
    told = subprocess.run(
        [program("nft"), "--json", "list", "counter", "inet", "loco", name],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    (found,) = (
        item["counter"] for item in json.loads(told.stdout)["nftables"] if "counter" in item
    )
    return int(found["packets"])


@contextmanager
def stranger(far: Far, source: str, target: str, count: int, port: int = PORT) -> Iterator[int]:
    """Holds what it gets of `count` connections, all opened at once; yields how many it got."""
    command = far.command(sys.executable, "-c", STRANGER, source, target, str(port), str(count))
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


@pytest.fixture
def far() -> Iterator[Far]:
    with two_hosts() as far:
        for address in (f"{GOOD}/24", f"{GOOD6}/48", f"{BAD6}/48"):
            subprocess.run(
                far.command("ip", "address", "add", address, "dev", "wan", *nodad(address)),
                check=True,
            )
        subprocess.run(
            [program("ip"), "address", "add", f"{HUB6}/48", "dev", "wan", "nodad"], check=True
        )
        yield far


def nodad(address: str) -> list[str]:
    """IPv6 addresses are usable at once, without the search for another owner."""
    return ["nodad"] if ":" in address else []


@contextmanager
def coordinator(directory: Path) -> Iterator[Process]:
    config = directory / "run.toml"
    config.write_text(tomli_w.dumps({**TINY, "limits": {"connections": TOTAL}}))
    command = loco("coordinator", str(config), "--state", str(directory / "state"))
    listen = ["--listen", f"{HUB}:{PORT}", "--insecure"]
    with Process(directory / "log", [*command, *listen]) as process:
        process.says("listening on")
        yield process


def answers(far: Far) -> bool:
    """Whether `loco status` from the good address is answered."""
    script = f"""
import grpc, sys
from loco.wire.v1 import coordinator_pb2 as pb, coordinator_pb2_grpc as pb_grpc
from loco.wire.protocol import PROTOCOL_VERSION
import socket, threading
# gRPC cannot choose its own address: a relay on this host does.
relay = socket.create_server(("127.0.0.1", 0))
def pump(a, b):
    try:
        while data := a.recv(65536):
            b.sendall(data)
    except OSError:
        pass
    b.close()
def serve():
    near, _ = relay.accept()
    away = socket.create_connection(("{HUB}", {PORT}), 3, ("{GOOD}", 0))
    threading.Thread(target=pump, args=(near, away), daemon=True).start()
    pump(away, near)
threading.Thread(target=serve, daemon=True).start()
channel = grpc.insecure_channel("127.0.0.1:%d" % relay.getsockname()[1])
stub = pb_grpc.CoordinatorServiceStub(channel)
stub.Status(pb.StatusRequest(protocol_version=PROTOCOL_VERSION), timeout=4)
"""
    done = subprocess.run(
        far.command(sys.executable, "-c", script), capture_output=True, text=True, check=False
    )
    return done.returncode == 0


def test_a_stranger_who_takes_every_connection_keeps_nobody_out(tmp_path: Path, far: Far) -> None:
    """Without the filter it does, for as long as a handshake may last."""
    subprocess.run(far.command("ip", "link", "set", "lo", "up"), check=True)
    with coordinator(tmp_path):
        with stranger(far, FAR, HUB, 2 * TOTAL):
            assert not answers(far), "else this scene shows nothing"
        load(rules(held=HELD, burst=600))
        with stranger(far, FAR, HUB, 2 * TOTAL) as got:
            assert got == HELD
            assert answers(far)
        assert counter("too_many") >= 2 * TOTAL - HELD


@pytest.mark.parametrize(
    ("bad", "good", "target"), [(FAR, GOOD, HUB), (BAD6, GOOD6, HUB6)], ids=["ipv4", "ipv6"]
)
def test_an_address_that_opens_connections_too_fast_is_alone_in_it(
    far: Far, bad: str, good: str, target: str
) -> None:
    """Also one that closes each at once, as a flood of handshakes does."""
    load(rules(held=600, burst=BURST))
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.create_server((target, PORT), family=family, backlog=100):
        with stranger(far, bad, target, 3 * BURST) as got:
            assert BURST <= got < 3 * BURST
            dropped = counter("too_fast")
            assert dropped >= 1
            with stranger(far, good, target, BURST) as got:
                assert got == BURST
        assert counter("too_fast") >= dropped


@pytest.mark.parametrize(
    ("bad", "good", "target"), [(FAR, GOOD, HUB), (BAD6, GOOD6, HUB6)], ids=["ipv4", "ipv6"]
)
def test_the_page_has_a_bound_of_its_own_by_address(
    far: Far, bad: str, good: str, target: str
) -> None:
    """Far below what the coordinator's page takes in all, which others need, too."""
    load(RULES.read_text())
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with (
        socket.create_server((target, PAGE), family=family, backlog=300),
        socket.create_server((target, PORT), family=family, backlog=300),
        stranger(far, bad, target, MOST_CONNECTIONS, port=PAGE) as got,
    ):
        assert got == 64 <= MOST_CONNECTIONS // 4
        assert counter("too_many") >= MOST_CONNECTIONS - 64
        with stranger(far, good, target, 8, port=PAGE) as of_another:
            assert of_another == 8
        with stranger(far, bad, target, 8) as at_the_other_port:
            assert at_the_other_port == 8


def test_other_ports_and_this_host_are_left_alone(far: Far) -> None:
    load(rules(held=1, burst=1))
    with (
        socket.create_server((HUB, PORT + 1), backlog=100),
        socket.create_server(("127.0.0.1", PORT), backlog=100) as local,
    ):
        mine = [socket.create_connection(local.getsockname()) for _ in range(5)]
        with stranger(far, FAR, HUB, 5, port=PORT + 1) as got:
            assert got == 5
        for connection in mine:
            connection.close()
    assert counter("too_many") == counter("too_fast") == 0
