"""Can this process listen where it is told to? Asked before anything is created on disk."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from loco.errors import ConfigError
from loco.wire.protocol import split_address


def check_free(addresses: Mapping[str, str | None]) -> None:
    """Take each HOST:PORT for a moment; `addresses` by the flag that gave them.

    Nothing listens meanwhile, so that no site that tries to come back is accepted and dropped.

    Raises:
        ConfigError: names the address, what the system says, and the flag to change.
    """
    taken: dict[str, str] = {}
    for flag, address in addresses.items():
        if address is None:
            continue
        if address in taken and split_address(address)[1]:
            raise ConfigError(
                f"{taken[address]} and {flag} are both {address}: give another {flag}"
            )
        taken[address] = flag
        _check(flag, address)


def _check(flag: str, address: str) -> None:
    host, port = split_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, where = found[0]
        with socket.socket(family, kind, protocol) as probe:
            # As gRPC does: connections of a coordinator that has just ended do not block its port,
            # one that listens does.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {address}: {error.strerror}; is another coordinator running? "
            f"give another {flag}"
        ) from error
