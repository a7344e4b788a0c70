"""Who may call what: every method of the wire against every identity, over real mutual TLS.

Compared with: a table written down here, and the services' descriptors, so that a new method
without a rule, a rule without a method, and a request that names a site unchecked fail. Run alone:
pytest tests/coordinator/test_gate.py
"""

from __future__ import annotations

import json
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from support.certs import Certs, channel
from support.live import Coordinator, Member, coordinating
from support.runs import config_of, create_store

from coordinator.audit import FILE, REFUSALS
from coordinator.gate import RULES
from loco.wire.protocol import REASON_KEY
from loco.wire.v1 import coordinator_pb2 as pb

SERVICES = (
    pb.DESCRIPTOR.services_by_name["CoordinatorService"],
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
)
METHODS = {f"/{s.full_name}/{m.name}": m for s in SERVICES for m in s.methods}

# What each method answers to paris, oslo (speaking for paris), an operator and a reader.
# "in": the gate lets it in, whatever the service says then.
MEMBER = ("in", "identity", "role", "role")
ANYONE = ("in", "in", "in", "in")
WATCHERS = ("role", "role", "in", "in")
EXPECTED = {
    "GetRun": ANYONE,
    "Join": MEMBER,
    "Heartbeat": MEMBER,
    "Push": MEMBER,
    "PushOffset": MEMBER,
    "WaitRound": MEMBER,
    "Pull": MEMBER,
    "Snapshot": MEMBER,
    "Leave": MEMBER,
    "Status": ANYONE,
    "Control": ("role", "role", "in", "role"),
    "Probe": ("in", "in", "in", "role"),
    "Check": ANYONE,
    "List": ("role",) * 4,
    "Watch": WATCHERS,
    "ServerReflectionInfo": WATCHERS,
}
ALLOWED = ("paris", "oslo", "operator", "reader")
# Not let in as far as any method: refused by the handshake, or by the gate with a reason.
CLOSED = {
    "nobody": "handshake",
    "plaintext": "handshake",
    "wrong CA": "handshake",
    "expired": "handshake",
    "not yet valid": "handshake",
    "a server's certificate": "handshake",
    "revoked": "revoked",
    "expired since": "expired",
    "no name": "identity",
}


@dataclass
class Doors:
    """A coordinator and a connection for each identity."""

    coordinator: Coordinator
    channels: dict[str, grpc.Channel]

    def try_(self, identity: str, method: str) -> str:
        """`in`, `handshake`, or the reason of the gate."""
        descriptor = METHODS[method]
        request = GetMessageClass(descriptor.input_type)()
        name_site(request, "paris")
        call = self._call(identity, method, request)
        try:
            for _ in call:
                break
        except grpc.RpcError as error:
            status = cast(grpc.Call, error)
            reason = dict(iter(status.trailing_metadata() or ())).get(REASON_KEY)
            if reason in ("role", "identity", "revoked", "expired"):
                return str(reason)
            if status.code() == grpc.StatusCode.UNAVAILABLE and reason is None:
                return "handshake"
            assert status.code() != grpc.StatusCode.UNIMPLEMENTED
        else:
            call.cancel()
        return "in"

    def _call(self, identity: str, method: str, request: Message) -> Any:
        """All methods as streams: the wire does not know the difference."""
        make = self.channels[identity].stream_stream(
            method,
            request_serializer=type(request).SerializeToString,
            response_deserializer=lambda data: data,
        )
        return make(iter([request]), timeout=10)


def name_site(request: Message, site: str) -> None:
    """Set whichever field of the request names a site."""
    rule = RULES.get(f"/{SERVICES[0].full_name}/{type(request).__name__.removesuffix('Request')}")
    if rule is None or rule.site is None:
        return
    *path, last = rule.site.split(".")
    owner: Any = request
    for field in path:
        owner = getattr(owner, field)
    setattr(owner, last, site)


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    directory = tmp_path_factory.mktemp("doors")
    certs, strangers = Certs(directory / "certs"), Certs(directory / "strangers")
    config = config_of(quorum={"min_sites": 2}, limits={"requests_per_second": 1000.0})
    with coordinating(create_store(directory / "state", config), certs) as coordinator:
        soon = certs.odd("late", end=timedelta(seconds=3))
        paths = {
            "paris": certs.bundle("paris"),
            "oslo": certs.bundle("oslo"),
            "operator": certs.bundle("ops", "operator"),
            "reader": certs.bundle("prometheus", "reader"),
            "wrong CA": foreign(strangers.bundle("paris"), certs),
            "expired": certs.odd("paris", end=timedelta(seconds=-1), suffix="expired"),
            "not yet valid": certs.odd("paris", begin=timedelta(hours=1), end=timedelta(hours=2)),
            "a server's certificate": certs.coordinator,
            "revoked": certs.bundle("lost"),
            "expired since": soon,
            "no name": certs.nameless(),
        }
        address = coordinator.address
        channels = {name: channel(address, path) for name, path in paths.items()}
        root = grpc.ssl_channel_credentials((directory / "certs" / "ca.pem").read_bytes())
        channels["nobody"] = grpc.secure_channel(address, root)
        channels["plaintext"] = grpc.insecure_channel(address)
        found = Doors(coordinator, channels)
        # Both are let in while they may, and then not any more, on the same connection.
        assert found.try_("expired since", f"/{SERVICES[0].full_name}/Status") == "in"
        assert found.try_("revoked", f"/{SERVICES[0].full_name}/Status") == "in"
        certs.authority.revoke("lost")
        time.sleep(3.1)
        yield found
        for connection in channels.values():
            connection.close()


def foreign(path: Path, certs: Certs) -> Path:
    """A stranger's key and certificate beside our authority's: it trusts us, not we it."""
    own = path.read_text()
    mixed = own[: own.rindex("-----BEGIN")] + certs.authority_pem()
    target = path.with_name("mixed.pem")
    target.touch(0o600)
    target.write_text(mixed)
    return target


# --- the matrix -----------------------------------------------------------------------------------


@pytest.mark.parametrize("identity", ALLOWED)
@pytest.mark.parametrize("method", METHODS, ids=lambda path: path.rpartition("/")[2])
def test_a_known_identity_is_let_in_or_refused(doors: Doors, method: str, identity: str) -> None:
    expected = EXPECTED[method.rpartition("/")[2]][ALLOWED.index(identity)]
    assert doors.try_(identity, method) == expected


@pytest.mark.parametrize("identity", CLOSED)
@pytest.mark.parametrize("method", METHODS, ids=lambda path: path.rpartition("/")[2])
def test_everybody_else_is_refused(doors: Doors, method: str, identity: str) -> None:
    assert doors.try_(identity, method) == CLOSED[identity]


# --- the table is whole ---------------------------------------------------------------------------


def test_every_method_has_a_rule_and_every_rule_a_method() -> None:
    assert set(RULES) == set(METHODS)
    assert set(EXPECTED) == {method.name for method in METHODS.values()}


def fields_named(descriptor: Descriptor, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Paths of the fields that say for which site a request speaks."""
    for field in descriptor.fields:
        here = (*path, field.name)
        if field.message_type is not None and not field.is_repeated:
            yield from fields_named(field.message_type, here)
        elif field.name == "site" and field.type == FieldDescriptor.TYPE_STRING:
            yield ".".join(here)


@pytest.mark.parametrize("method", METHODS, ids=lambda path: path.rpartition("/")[2])
def test_a_request_that_names_a_site_is_checked_against_the_certificate(method: str) -> None:
    """An operator's order names the site that it is about, not one for which it speaks."""
    named = list(fields_named(METHODS[method].input_type))
    rule = RULES[method]
    expected = [] if rule.roles == {"operator"} else named
    assert [rule.site] == expected if expected else rule.site is None


def test_a_method_for_nobody_is_closed_in_plaintext_too(tmp_path: Path) -> None:
    with coordinating(create_store(tmp_path, config_of())) as plain:
        found = Doors(plain, {"anyone": plain.channel("anyone")})
        assert found.try_("anyone", "/grpc.health.v1.Health/List") == "role"
        assert found.try_("anyone", "/grpc.health.v1.Health/Check") == "in"
        found.channels["anyone"].close()


# --- the connection -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "accepted"), [(ssl.TLSVersion.TLSv1_2, False), (ssl.TLSVersion.TLSv1_3, True)]
)
def test_only_tls_1_3_is_spoken(doors: Doors, version: ssl.TLSVersion, accepted: bool) -> None:
    """By another implementation, which would speak 1.2 as well."""
    assert doors.coordinator.certs is not None
    bundle = doors.coordinator.certs.bundle("paris")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = context.maximum_version = version
    context.load_verify_locations(bundle.with_name("ca.pem"))
    context.load_cert_chain(bundle)
    context.set_alpn_protocols(["h2"])
    host, port = doors.coordinator.address.split(":")
    with socket.create_connection((host, int(port)), 10) as raw:
        if not accepted:
            with pytest.raises(ssl.SSLError):
                context.wrap_socket(raw, server_hostname=host)
            return
        with context.wrap_socket(raw, server_hostname=host) as connection:
            assert connection.version() == "TLSv1.3"
            assert connection.recv(1), "HTTP/2 settings"


# --- the audit log --------------------------------------------------------------------------------


def test_the_audit_log_tells_who_did_what_and_what_was_refused(tmp_path: Path) -> None:
    certs = Certs(tmp_path / "certs")
    store = create_store(tmp_path / "state", config_of(quorum={"min_sites": 2}))
    with coordinating(store, certs) as coordinator, Member(coordinator, "paris") as paris:
        paris.enter()
        paris.stub.Leave(pb.LeaveRequest(caller=paris.caller, reason="lunch\n\x9b2J"), timeout=10)
        order = pb.ControlRequest(protocol_version=1, verb=pb.CONTROL_VERB_PAUSE)
        with pytest.raises(grpc.RpcError):
            paris.stub.Control(order, timeout=10)
        with coordinator.channel("ops", "operator") as connection:
            pb_call(connection, "Control", order)
    texts = [(store.directory / name).read_text() for name in (FILE, REFUSALS)]
    done, refused = ([json.loads(line) for line in text.splitlines()] for text in texts)
    assert [(line["event"], line["who"]) for line in (*done, *refused)] == [
        ("join", "site 'paris'"),
        ("leave", "site 'paris'"),
        ("control", "operator 'ops'"),
        ("refused", "site 'paris'"),
    ]
    assert done[0]["incarnation"] == 1
    assert done[1]["reason"] == "lunch\n\x9b2J"
    assert texts[0].isascii()
    assert coordinator.running.monitor.notes[-2].message == r"site paris left: lunch\n\x9b2J"
    assert done[2]["verb"] == "pause"
    method = f"/{SERVICES[0].full_name}/Control"
    assert (refused[0]["reason"], refused[0]["method"]) == ("role", method)
    assert all(line["peer"].startswith("ipv4:127.0.0.1:") for line in (*done, *refused))


def pb_call(connection: grpc.Channel, name: str, request: Message) -> bytes:
    call = connection.unary_unary(
        f"/{SERVICES[0].full_name}/{name}", request_serializer=type(request).SerializeToString
    )
    return bytes(call(request, timeout=10))
