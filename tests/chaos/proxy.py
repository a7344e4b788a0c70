"""A TCP proxy between a site and the coordinator, with a link that a test can spoil.

Bytes are never dropped: TCP would send them again. A partition holds them back or resets the
connections; a slow link passes them later. Corruption is what TCP's checksum has missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Direction = Literal["up", "down"]  # up: from the site to the coordinator

PIECE_BYTES = 4096  # passes at once on a slow link, so that connections take turns
_QUEUE_PIECES = 64
_SOCKET_BUFFER_BYTES = 32 * 1024  # or the kernel would take a whole upload at full speed


@dataclass
class Link:
    """The state of the line; change it through `Proxy.change`."""

    latency_seconds: float = 0.0
    bytes_per_second: float | None = None
    """Shared by all connections, in each direction."""
    up: bool = True
    """False: new connections are refused."""
    flowing: bool = True
    """False: connections stay open and nothing passes."""
    cut_after: dict[Direction, int] = field(default_factory=dict)
    """Reset the connection that carries this byte, counted from now; then forget it."""
    corrupt: dict[Direction, int] = field(default_factory=dict)
    """Flip a bit in so many of the next pieces that lie in the middle of bulk data."""


class Proxy:
    """Listens on a port of its own and forwards to `target` (host, port)."""

    def __init__(self, target: tuple[str, int], seed: int = 0) -> None:
        self._target = target
        self._random = random.Random(seed)
        self._link = Link()
        self.passed: dict[Direction, int] = {"up": 0, "down": 0}
        """Bytes forwarded so far."""
        self.corrupted = 0
        self.cuts = 0
        self._connections: set[asyncio.Transport] = set()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()
        self._ready.wait()

    # --- called by tests ------------------------------------------------------------------------

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def change(self, **fields: object) -> None:
        """Set fields of the link."""

        def apply() -> None:
            for name, value in fields.items():
                assert hasattr(self._link, name), name
                setattr(self._link, name, value)
            self._changed.set()

        self._call(apply)

    def cut(self) -> None:
        """Reset every connection now; new ones are welcome."""
        self._call(self._reset_all)

    def partition(self) -> None:
        """Reset every connection and refuse new ones."""
        self.change(up=False)
        self.cut()

    def heal(self) -> None:
        """A perfect line again."""
        self.change(**vars(Link()))

    def close(self) -> None:
        self._call(self._reset_all)
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    # --- in the proxy's thread ------------------------------------------------------------------

    def _call(self, work: Callable[[], None]) -> None:
        done = threading.Event()

        def run() -> None:
            work()
            done.set()

        self._loop.call_soon_threadsafe(run)
        done.wait()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._stop, self._changed = asyncio.Event(), asyncio.Event()
        self._lanes: dict[Direction, asyncio.Lock] = {"up": asyncio.Lock(), "down": asyncio.Lock()}
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
        listener.bind(("127.0.0.1", 0))
        self._port = listener.getsockname()[1]
        server = await asyncio.start_server(self._accept, sock=listener, limit=PIECE_BYTES)
        self._ready.set()
        await self._stop.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, site: asyncio.StreamReader, to_site: asyncio.StreamWriter) -> None:
        transports = [to_site.transport]
        try:
            if not self._link.up:
                return
            coordinator, to_coordinator = await asyncio.open_connection(
                *self._target, limit=PIECE_BYTES
            )
            transports.append(to_coordinator.transport)
            self._connections.update(transports)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._forward("up", site, to_coordinator))
                tasks.create_task(self._forward("down", coordinator, to_site))
        except (OSError, ExceptionGroup):
            pass  # a broken connection is what this is for; both ends see a reset
        finally:
            for transport in transports:
                transport.abort()
            self._connections.difference_update(transports)

    async def _forward(
        self, direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """One direction of a connection: read, wait in the line, write."""
        line: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUE_PIECES)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read(reader, line))
            tasks.create_task(self._write(direction, line, writer))

    async def _read(
        self, reader: asyncio.StreamReader, line: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        while True:
            data = await reader.read(PIECE_BYTES)
            await line.put((self._loop.time() + self._link.latency_seconds, data))
            if not data:
                return

    async def _write(
        self,
        direction: Direction,
        line: asyncio.Queue[tuple[float, bytes]],
        writer: asyncio.StreamWriter,
    ) -> None:
        bulk = False
        while True:
            due, data = await line.get()
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            await self._until_flowing()
            if not data:
                raise ConnectionResetError  # closes both directions: gRPC needs no half-open ones
            await self._take_time(direction, len(data))
            self._count_down(direction, len(data))
            if bulk and len(data) == PIECE_BYTES:
                data = self._spoil(direction, data)
            bulk = len(data) == PIECE_BYTES
            writer.write(data)
            await writer.drain()
            self.passed[direction] += len(data)

    async def _until_flowing(self) -> None:
        while not self._link.flowing:
            self._changed.clear()
            await self._changed.wait()

    async def _take_time(self, direction: Direction, num_bytes: int) -> None:
        if self._link.bytes_per_second is None:
            return
        async with self._lanes[direction]:  # first come, first served: one line for all
            rate = self._link.bytes_per_second
            if rate is not None:
                await asyncio.sleep(num_bytes / rate)

    def _count_down(self, direction: Direction, num_bytes: int) -> None:
        """Raise where the connection was to be cut."""
        left = self._link.cut_after.get(direction)
        if left is None:
            return
        if left <= num_bytes:
            del self._link.cut_after[direction]
            self.cuts += 1
            raise ConnectionResetError
        self._link.cut_after[direction] = left - num_bytes

    def _spoil(self, direction: Direction, data: bytes) -> bytes:
        if not self._link.corrupt.get(direction, 0):
            return data
        self._link.corrupt[direction] -= 1
        self.corrupted += 1
        spoiled = bytearray(data)
        spoiled[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        return bytes(spoiled)

    def _reset_all(self) -> None:
        for transport in self._connections:
            transport.abort()
