"""Can this process listen where it is told to? Asked before anything is created on disk."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping

from loco.errors import ConfigError
from loco.wire.protocol import split_address


def check_free(addresses: Mapping[str, str | None]) -> None:
    """Listen on each HOST:PORT for a moment; `addresses` by the flag that gave them.

    All at once, so that two flags with one port are found, too.

    Raises:
        ConfigError: names the address, what the system says, and the flag to change.
    """
    with contextlib.ExitStack() as held:
        for flag, address in addresses.items():
            if address is not None:
                _hold(held, flag, address)


def _hold(held: contextlib.ExitStack, flag: str, address: str) -> None:
    host, port = split_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, where = found[0]
        probe = held.enter_context(socket.socket(family, kind, protocol))
        # As gRPC does: connections of a coordinator that has just ended do not block its port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(where)
        probe.listen(1)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {address}: {error.strerror}; is another coordinator running? "
            f"give another {flag}"
        ) from error
