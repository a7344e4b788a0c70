"""`loco control`: an operator's orders to a running coordinator."""

from __future__ import annotations

import grpc

from loco.errors import ConfigError
from loco.wire.access import Access, Link
from loco.wire.protocol import PROTOCOL_VERSION
from loco.wire.v1 import coordinator_pb2 as pb

VERBS = ("set", "pause", "resume", "drain", "evict", "readmit", "snapshot")

_TIMEOUT_SECONDS = 10.0


def control(address: str, verb: str, argument: str | None, access: Access | None = None) -> str:
    """Send one order; returns what will happen, in words. `access` defaults to plaintext.

    Raises:
        ConfigError: the verb or its argument is not possible.
        RefusedError, UnreachableError: as the coordinator answers, or does not.
    """
    request = _request(verb, argument)
    link = Link(address, access or Access())
    try:
        answer = link.stub.Control(request, timeout=_TIMEOUT_SECONDS)
    except grpc.RpcError as error:
        raise link.failure(error) from None
    finally:
        link.close()
    return answer.message


def _request(verb: str, argument: str | None) -> pb.ControlRequest:
    if verb not in VERBS:
        raise ConfigError(f"control verb {verb!r} is not known: use {', '.join(VERBS)}")
    needs = {"set": "KEY=VALUE", "evict": "SITE", "readmit": "SITE"}.get(verb)
    if (needs is None) != (argument is None):
        shape = f"{verb} {needs}" if needs else verb
        raise ConfigError(f"write: loco control HOST:PORT {shape}")
    request = pb.ControlRequest(
        protocol_version=PROTOCOL_VERSION,
        verb=pb.ControlVerb.Value(f"CONTROL_VERB_{verb.upper()}"),
    )
    if verb == "set":
        assert argument is not None
        request.key, equals, request.value = argument.partition("=")
        if not equals:
            raise ConfigError(f"{argument!r} is not KEY=VALUE, for example outer.alpha=0.6")
    elif argument is not None:
        request.site = argument
    return request
