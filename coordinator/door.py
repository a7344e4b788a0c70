"""Lets connections in to the page, and no more than so many at a time.

Each takes an open file of the coordinator, also while it shakes hands: strangers must not take the
last ones. asyncio's own server has no such bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator

from aiohttp import web

log = logging.getLogger("loco.coordinator")

MOST_CONNECTIONS = 256
HANDSHAKE_SECONDS = 10.0  # a connection that has not finished it by then is closed
_SAY_SECONDS = 60.0
_RETRY_SECONDS = 0.1
_BACKLOG = 128
_NOT_HERE = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)  # localhost is ::1, too, with IPv6 or without


class Door:
    """The listening sockets of one address. Who comes while it is full is hung up on, at once."""

    def __init__(self, host: str, port: int) -> None:
        """Listens from now on. OSError where the address cannot be had."""
        self._sockets = _listen(host, port)
        self._entering: set[asyncio.Task[None]] = set()
        self._said = -_SAY_SECONDS

    @property
    def port(self) -> int:
        """The one that was given for port 0, else the one asked for."""
        return int(self._sockets[0].getsockname()[1])

    @contextlib.asynccontextmanager
    async def open(self, server: web.Server, context: ssl.SSLContext | None) -> AsyncIterator[None]:
        """Let in while the block runs; who is in at its end is the server's to send away."""
        accepting = [
            asyncio.create_task(self._accept(each, server, context)) for each in self._sockets
        ]
        try:
            yield
        finally:
            tasks = (*accepting, *self._entering)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.close()

    def close(self) -> None:
        """Stop listening."""
        for each in self._sockets:
            each.close()

    async def _accept(
        self,
        listening: socket.socket,
        server: web.Server,
        context: ssl.SSLContext | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:  # no file is free, or who came has gone
                self._say(f"nobody is let in to the page: {error}")
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if len(server.connections) + len(self._entering) >= MOST_CONNECTIONS:
                connection.close()
                self._say(f"the page has {MOST_CONNECTIONS} connections: others are turned away")
                continue
            task = loop.create_task(_enter(connection, server, context))
            self._entering.add(task)
            task.add_done_callback(self._entering.discard)

    def _say(self, message: str) -> None:
        now = time.monotonic()
        if now - self._said >= _SAY_SECONDS:
            self._said = now
            log.warning("%s", message)


async def _enter(
    connection: socket.socket,
    server: web.Server,
    context: ssl.SSLContext | None,
) -> None:
    try:
        await asyncio.get_running_loop().connect_accepted_socket(
            server,
            connection,
            ssl=context,
            ssl_handshake_timeout=None if context is None else HANDSHAKE_SECONDS,
        )
    except OSError as error:  # of TLS, too; asyncio has closed the connection
        log.debug("a connection to the page ended in its handshake: %s", error)


def _listen(host: str, port: int) -> list[socket.socket]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    opened: list[socket.socket] = []
    failure: OSError | None = None
    for family, where in dict.fromkeys((family, where) for family, _, _, _, where in found):
        try:
            opened.append(socket.create_server(where, family=family, backlog=_BACKLOG))
            opened[-1].setblocking(False)
        except OSError as error:
            failure = error
            if error.errno not in _NOT_HERE:
                break
    else:
        if opened:
            return opened
    for each in opened:
        each.close()
    assert failure is not None
    raise failure
