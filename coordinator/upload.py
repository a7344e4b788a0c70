"""Receiving one shard of a contribution: header, blocks, checks, disk, and only then the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import xxhash
from google.protobuf.message import Message

from coordinator.admission import check_push
from coordinator.contributions import check_contribution
from coordinator.engine import Engine
from coordinator.events import Duplicate, ShardStored
from coordinator.monitor import Monitor
from coordinator.refused import RefusedRequest, check_run, raise_refusal
from coordinator.store import Aside
from loco import codec
from loco.errors import PayloadError
from loco.layout import CHUNK, cells
from loco.wire.v1 import coordinator_pb2 as pb

Count = Callable[[str, str, str, Message], None]


class Upload:
    """State of one Push stream."""

    def __init__(self, engine: Engine, monitor: Monitor, count: Count) -> None:
        self._engine = engine
        self._monitor = monitor
        self._count = count
        self.site = ""

    async def receive(self, requests: AsyncIterator[pb.PushRequest]) -> pb.PushResponse:
        """Accept or refuse the shard; a repeat gets the stored answer without its bytes."""
        first = await anext(aiter(requests), pb.PushRequest())
        if first.WhichOneof("part") != "header":
            raise RefusedRequest("corrupt", "a push begins with its header")
        header = first.header
        self.site = header.caller.site
        self._count(self.site, "up", "contribution", first)
        event = _event(header)
        if self._admit(header, event):
            return pb.PushResponse(duplicate=True)
        path = await self._store(requests, header, event)
        await self._decode(path, event)
        answer = await self._engine.submit(event)
        raise_refusal(answer)
        return pb.PushResponse(duplicate=isinstance(answer, Duplicate))

    def _admit(self, header: pb.PushHeader, event: ShardStored) -> bool:
        """True for a repeat of what was accepted; refused requests raise."""
        state = self._engine.state
        check_run(header.caller.run_id, self._engine.store.run_id)
        answer = check_push(state, event)
        raise_refusal(answer)
        if isinstance(answer, Duplicate):
            return True
        if header.theta_digest != state.theta_digest:
            raise RefusedRequest(
                "digest",
                f"site {event.site!r} measures from theta {header.theta_digest[:16]}, the run's "
                f"at round {state.round} is {state.theta_digest[:16]}: fetch the snapshot",
            )
        limit = self._size_limit(event)
        if header.size_bytes > limit:
            raise RefusedRequest(
                "shard",
                f"shard {event.shard} of {event.site!r} declares {header.size_bytes} bytes; at "
                f"most {limit} fit its rows",
            )
        return False

    def _size_limit(self, event: ShardStored) -> int:
        rows = self._engine.store.layout.shard(event.shard, event.num_shards)
        return sum(codec.HEADER_BYTES + 8 * CHUNK * len(cell) for cell in cells(rows))

    async def _store(
        self, requests: AsyncIterator[pb.PushRequest], header: pb.PushHeader, event: ShardStored
    ) -> Path:
        """Write the blocks to disk, whole, synced and as declared; then the file has its name."""
        path = self._engine.store.contribution(
            event.round, event.site, event.incarnation, event.shard, event.digest
        )
        aside = self._engine.store.receive(path)
        try:
            size, digest = await self._write(requests, event, aside)
            if size != event.size_bytes or digest != header.digest:
                raise RefusedRequest(
                    "corrupt",
                    f"shard {event.shard} of {event.site!r}: {size} bytes with digest "
                    f"{digest.hex()[:16]} came, {event.size_bytes} bytes with "
                    f"{event.digest[:16]} were declared",
                )
            await asyncio.to_thread(aside.commit)
        finally:
            aside.abort()
        return path

    async def _write(
        self, requests: AsyncIterator[pb.PushRequest], event: ShardStored, aside: Aside
    ) -> tuple[int, bytes]:
        """Size and XXH3-128 of what came; stops at the first byte too many."""
        digest, size = xxhash.xxh3_128(), 0
        async for request in requests:
            self._count(event.site, "up", "contribution", request)
            await self._engine.heard(event.site, event.incarnation)
            raise_refusal(check_push(self._engine.state, event))  # the round may have closed
            data = request.block.data
            size += len(data)
            if size > event.size_bytes:
                break
            digest.update(data)
            await asyncio.to_thread(aside.write, data)
        return size, digest.digest()

    async def _decode(self, path: Path, event: ShardStored) -> None:
        rows = self._engine.store.layout.shard(event.shard, event.num_shards)
        bits = self._engine.store.config.codec.bits
        started = time.monotonic()
        try:
            num_values = await asyncio.to_thread(check_contribution, path, rows, bits=bits)
        except PayloadError as error:
            path.unlink(missing_ok=True)
            raise RefusedRequest(
                "payload", f"shard {event.shard} of {event.site!r} is malformed: {error}"
            ) from error
        self._monitor.contribution(event, num_values, time.monotonic() - started)


def _event(header: pb.PushHeader) -> ShardStored:
    return ShardStored(
        site=header.caller.site,
        incarnation=header.caller.incarnation,
        round=header.round,
        fragment=header.fragment,
        shard=header.shard,
        num_shards=header.num_shards,
        size_bytes=header.size_bytes,
        digest=header.digest.hex(),
        tokens=header.tokens,
        inner_steps=header.inner_steps,
    )
