"""Certificates as a user meets them: two commands to a secured run, and every way to get it wrong.

Through the real command line, against real coordinators; where the coordinator itself must be wrong
(expired, of another authority), against a real gRPC server with such a certificate. Each bad input
is one line with a remedy, exit code 3 (refused) or 4 (no coordinator that can be trusted), and one
attempt or two. Run alone: pytest tests/integration/test_tls.py
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent import futures
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from support.certs import Certs
from support.cluster import Cluster, run_loco
from support.live import Coordinator, Member, coordinating, eventually
from support.runs import config_of, create_store

from loco.status import StatusClient
from loco.wire.access import Access, Link
from loco.wire.v1 import coordinator_pb2 as pb

CONFIG = config_of(quorum={"min_sites": 2})
REFUSED, UNREACHABLE = 3, 4
DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    return Certs(tmp_path_factory.mktemp("certs") / "certs")


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    return Certs(tmp_path_factory.mktemp("strangers") / "certs")


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory, certs: Certs) -> Iterator[Coordinator]:
    with coordinating(create_store(tmp_path_factory.mktemp("state"), CONFIG), certs) as running:
        yield running


@contextlib.contextmanager
def serving(bundle: Path, trusts: Path) -> Iterator[str]:
    """A gRPC server with a certificate that no coordinator would start with."""
    pems = [f"-----BEGIN{part}" for part in bundle.read_text().split("-----BEGIN")[1:]]
    credentials = grpc.ssl_server_credentials(
        [(pems[0].encode(), pems[1].encode())], trusts.read_bytes(), require_client_auth=True
    )
    with futures.ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(0).wait()


@contextlib.contextmanager
def counting(address: str) -> Iterator[tuple[str, list[int]]]:
    """A forwarder to `address` that notes each connection."""
    host, port = address.split(":")
    accepted: list[int] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def forward(near: socket.socket) -> None:
        with near, socket.create_connection((host, int(port))) as far:
            back = threading.Thread(target=pump, args=(far, near), daemon=True)
            back.start()
            pump(near, far)
            back.join()

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                accepted.append(1)
                threading.Thread(target=forward, args=(near,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}", accepted
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def ends(*arguments: str, code: int, says: tuple[str, ...]) -> None:
    """The command ends with `code` and one line that contains all of `says`."""
    done = run_loco(*arguments)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == code, done.stderr
    assert lines[-1].startswith("loco: ")
    # A worker says first that it is there; nothing else may come between.
    assert [line for line in lines if line.startswith(("loco: ", "E0", "I0"))] == lines[-1:]
    for text in says:
        assert text in lines[-1]


def both(address: str, *flags: str, code: int, says: tuple[str, ...], attempts: int = 4) -> None:
    """`loco status` and `loco worker` end alike, at once, after a few connections."""
    for command in (("status",), ("worker", "--site", "paris", "--coordinator")):
        with counting(address) as (counted, accepted):
            began = time.monotonic()
            ends(*command, counted, *flags, code=code, says=says)
            assert len(accepted) <= attempts, "a retry storm"
            assert time.monotonic() - began < 30.0


# --- what a user gets wrong -----------------------------------------------------------------------


def test_plaintext_to_a_tls_port(coordinator: Coordinator) -> None:
    both(coordinator.address, code=UNREACHABLE, says=("speaks TLS", "--bundle FILE"))


def test_tls_to_a_plaintext_port(tmp_path: Path, certs: Certs) -> None:
    with coordinating(create_store(tmp_path, CONFIG)) as plain:
        says = ("does not speak TLS", "without --bundle")
        bundle = str(certs.bundle("paris"))
        both(plain.address, "--bundle", bundle, code=UNREACHABLE, says=says)


def test_a_bundle_of_another_authority(coordinator: Coordinator, strangers: Certs) -> None:
    says = ("was not issued by the authority in", "the bundle another run's")
    bundle = str(strangers.bundle("paris"))
    both(coordinator.address, "--bundle", bundle, code=UNREACHABLE, says=says)


def test_an_expired_bundle(coordinator: Coordinator, certs: Certs) -> None:
    bundle = str(certs.odd("paris", begin=-2 * DAY, end=-DAY, suffix="expired"))
    says = ("has expired", "set the clock, or get a new bundle (loco certs issue paris)")
    both(coordinator.address, "--bundle", bundle, code=REFUSED, says=says, attempts=0)


def test_a_bundle_from_the_future(coordinator: Coordinator, certs: Certs) -> None:
    """Which is what a clock that is behind looks like."""
    bundle = str(certs.odd("paris", begin=DAY, end=2 * DAY, suffix="future"))
    says = ("is not valid yet", "this machine's clock says")
    both(coordinator.address, "--bundle", bundle, code=REFUSED, says=says, attempts=0)


@pytest.mark.parametrize(
    ("begin", "end", "says"),
    [(-2 * DAY, -DAY, "has expired"), (DAY, 2 * DAY, "is not valid yet")],
)
def test_a_coordinator_outside_its_time(
    certs: Certs, begin: timedelta, end: timedelta, says: str
) -> None:
    odd = certs.odd(
        "coordinator", role="coordinator", hosts=("127.0.0.1",), begin=begin, end=end, suffix="odd"
    )
    bundle = str(certs.bundle("paris"))
    with serving(odd, certs.coordinator.with_name("ca.pem")) as address:
        expected = ("the certificate of the coordinator", says, "clock")
        both(address, "--bundle", bundle, code=UNREACHABLE, says=expected)


def test_a_coordinator_without_the_name(certs: Certs) -> None:
    odd = certs.odd("coordinator", role="coordinator", hosts=("elsewhere.org",), suffix="odd")
    bundle = str(certs.bundle("paris"))
    with serving(odd, certs.coordinator.with_name("ca.pem")) as address:
        says = ("is not made for the address 127.0.0.1", "--host 127.0.0.1")
        both(address, "--bundle", bundle, code=UNREACHABLE, says=says)


def test_a_coordinator_that_does_not_accept_us(certs: Certs, strangers: Certs) -> None:
    """Its authority is another one, or its clock is wrong: gRPC closes without a word."""
    with serving(certs.coordinator, strangers.coordinator.with_name("ca.pem")) as address:
        says = ("does not accept the certificate of site 'paris'", "clock")
        both(address, "--bundle", str(certs.bundle("paris")), code=REFUSED, says=says)


def test_a_site_cannot_be_another_nor_command(coordinator: Coordinator, certs: Certs) -> None:
    bundle = ("--bundle", str(certs.bundle("paris")))
    worker = ("worker", "--coordinator", coordinator.address, "--site", "oslo", *bundle)
    ends(*worker, code=2, says=("site 'paris'", "--site oslo", "--site paris"))
    order = ("control", coordinator.address, "pause", *bundle)
    ends(*order, code=REFUSED, says=("may not call Control", "operator"))


def test_a_revoked_site(coordinator: Coordinator, certs: Certs) -> None:
    bundle = str(certs.bundle("lost"))
    certs.authority.revoke("lost")
    time.sleep(1.2)  # the coordinator looks once a second
    ends(
        *("worker", "--coordinator", coordinator.address, "--site", "lost", "--bundle", bundle),
        code=REFUSED,
        says=("is revoked", "get a new bundle"),
    )


def test_files_that_are_no_bundle(coordinator: Coordinator, certs: Certs) -> None:
    for path, says in (
        (certs.coordinator, "is the coordinator's own bundle"),
        (certs.coordinator.with_name("ca.pem"), "is not a bundle"),
        (certs.coordinator.with_name("none.pem"), "cannot read the bundle"),
    ):
        ends("status", coordinator.address, "--bundle", str(path), code=2, says=(says,))


def test_plaintext_leaves_the_machine_only_when_it_is_said(tmp_path: Path, certs: Certs) -> None:
    """192.0.2.1 is nobody's (RFC 5737)."""
    far = "192.0.2.1:29400"
    ends("status", far, code=2, says=(far, "plaintext", "--bundle", "--insecure"))
    ends("control", far, "pause", code=2, says=(far, "--insecure"))
    ends("worker", "--site", "a", "--coordinator", far, code=2, says=(far, "--insecure"))
    bundle = ("--bundle", str(certs.bundle("paris")))
    ends("status", far, *bundle, "--insecure", code=2, says=("exclude each other",))
    config = tmp_path / "run.toml"
    assert run_loco("init", str(config)).returncode == 0
    start = ("coordinator", str(config), "--state", str(tmp_path / "state"))
    for flags, says in (
        (("--listen", "0.0.0.0:0"), ("--listen 0.0.0.0:0", "loco certs init", "--insecure")),
        (("--listen", "127.0.0.1:0", "--metrics", "0.0.0.0:0"), ("--metrics 0.0.0.0:0",)),
        (("--bundle", str(certs.bundle("paris"))), ("a coordinator needs coordinator.pem",)),
        (("--bundle", str(certs.coordinator), "--insecure"), ("exclude each other",)),
    ):
        ends(*start, *flags, code=2, says=says)
    assert not (tmp_path / "state").exists()


# --- what goes on without a restart ---------------------------------------------------------------


def test_certificates_are_renewed_while_everything_runs(tmp_path: Path) -> None:
    """A site whose bundle ends in seconds goes on with the new one; so does the coordinator."""
    certs = Certs(tmp_path / "certs")
    short = certs.odd("paris", end=timedelta(seconds=3), suffix="short")
    with coordinating(create_store(tmp_path / "state", CONFIG), certs) as coordinator:
        before = coordinator.metric(
            "loco_certificate_expiry_timestamp_seconds", certificate="coordinator"
        )
        link = Link(coordinator.address, Access(bundle=short))
        request = pb.StatusRequest(protocol_version=1)
        link.stub.Status(request, timeout=10)
        certs.bundle("paris").replace(short)  # as `loco certs issue` does: whole, under its name
        certs.authority.issue("coordinator", role="coordinator", days=60)
        time.sleep(3.2)
        link.stub.Status(request, timeout=10)
        link.close()
        fresh = StatusClient(coordinator.address, Access(bundle=certs.bundle("oslo")))
        fresh.fetch()
        fresh.close()
        after = eventually(
            lambda: (
                coordinator.metric(
                    "loco_certificate_expiry_timestamp_seconds", certificate="coordinator"
                )
                > before + 86_400
            ),
            "the metric tells the new end",
        )
        assert after


def test_a_site_with_a_spoiled_renewal_goes_on_with_the_old_one(tmp_path: Path) -> None:
    certs = Certs(tmp_path / "certs")
    with coordinating(create_store(tmp_path / "state", CONFIG), certs) as coordinator:
        bundle = certs.bundle("paris")
        link = Link(coordinator.address, Access(bundle=bundle))
        request = pb.StatusRequest(protocol_version=1)
        link.stub.Status(request, timeout=10)
        bundle.write_text("half of a file")
        certs.coordinator.write_text("half of a file")
        time.sleep(1.2)
        link.stub.Status(request, timeout=10)
        link.close()


def test_the_end_of_a_sites_certificate_is_a_metric_and_goes_with_it(tmp_path: Path) -> None:
    certs = Certs(tmp_path / "certs")
    with (
        coordinating(create_store(tmp_path / "state", CONFIG), certs) as coordinator,
        Member(coordinator, "paris") as paris,
    ):
        paris.enter()
        paris.beat()
        name = "loco_site_certificate_expiry_timestamp_seconds"
        ends_in = coordinator.metric(name, site="paris") - time.time()
        assert 29 * 86_400 < ends_in < 30 * 86_400
        coordinator.running.monitor.metrics.catalogue.forget_site("paris")
        assert coordinator.metric(name, site="paris") == 0.0


@pytest.mark.slow
def test_insecure_keeps_being_said(tmp_path: Path) -> None:
    """In the log, by `loco status`, and by a metric."""
    with Cluster(tmp_path, quorum={"min_sites": 1}) as cluster:
        port = cluster.address.rpartition(":")[2]
        command = ("--insecure", "--metrics", "127.0.0.1:0")
        everywhere = f"0.0.0.0:{port}"
        loopback, cluster.address = cluster.address, everywhere
        running = cluster.coordinator(*command)
        running.says("listening on")
        running.says("PLAINTEXT (--insecure)")
        cluster.address = loopback
        assert "PLAINTEXT" in run_loco("status", loopback).stdout
        assert cluster.status()["plaintext"] is True
        page = (cluster.state / "web-address").read_text()
        with urllib.request.urlopen(f"http://{page}/metrics", timeout=10) as answer:
            assert "\nloco_plaintext 1.0\n" in answer.read().decode()


@pytest.mark.slow
def test_two_commands_to_a_secured_run(tmp_path: Path) -> None:
    """`loco certs init`, `loco coordinator`; then sites join, and the run ends well."""
    with Cluster(tmp_path) as cluster:
        directory = tmp_path / "certs"
        made = run_loco(
            *("certs", "init", str(directory), "--host", "127.0.0.1"),
            *("--site", "paris", "--site", "oslo"),
        )
        assert made.returncode == 0, made.stderr
        cluster.bundle = directory / "ops.pem"
        cluster.coordinator("--bundle", str(directory / "coordinator.pem")).says("listening on")
        sites = [
            cluster.site(name, "--bundle", str(directory / f"{name}.pem"), ranks=ranks)
            for name, ranks in (("paris", 2), ("oslo", 1))
        ]
        status = cluster.finish(*sites)
        assert status["phase"] == "finished"
        assert status["plaintext"] is False
        assert {site["theta_agrees"] for site in status["sites"]} == {True}
