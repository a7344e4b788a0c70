"""Receiving one shard of a contribution: header, blocks, checks, disk, and only then the answer.

Bytes gather in `SITE.INC.SHARD.DIGEST.partial`; a stream that breaks off leaves them there, and the
next one goes on behind them. The digest in the name keeps bytes of other contents apart.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import BinaryIO

import xxhash
from google.protobuf.message import Message

from coordinator.admission import check_push
from coordinator.contributions import Checked, check_contribution
from coordinator.engine import DISK_FULL, Engine, is_disk_full
from coordinator.events import Duplicate, ShardRefused, ShardStored
from coordinator.failpoints import reach
from coordinator.files import rename_synced
from coordinator.monitor import Monitor
from coordinator.refused import RefusedRequest, raise_if_refused
from loco import codec
from loco.errors import PayloadError
from loco.layout import CHUNK, cells
from loco.wire.v1 import coordinator_pb2 as pb

Count = Callable[[str, str, str, Message], None]

STALL_SECONDS = 60.0  # without a message: the stream ends, what came stays


class Uploads:
    """All Push streams of this process; one stream at a time writes a shard, the newest."""

    def __init__(self, engine: Engine, monitor: Monitor, count: Count) -> None:
        self._engine = engine
        self._monitor = monitor
        self._count = count
        self._writers: dict[Path, object] = {}

    def offset(self, header: pb.PushHeader) -> int:
        """Bytes of this shard that are here already."""
        try:
            return min(self._partial(header).stat().st_size, header.size_bytes)
        except FileNotFoundError:
            return 0

    async def receive(self, requests: AsyncIterator[pb.PushRequest]) -> pb.PushResponse:
        """Accept or refuse the shard; a repeat gets the stored answer without its bytes."""
        requests = _until_stalled(requests)
        first = await anext(requests, pb.PushRequest())
        header = first.header
        self._count(header.caller.site, "up", "contribution", first)
        if first.WhichOneof("part") != "header":
            raise RefusedRequest("corrupt", "a push begins with its header")
        if self._admit(header):
            return pb.PushResponse(duplicate=True)
        try:
            await self._write(requests, header)
            checked = await self._check(header)
            return await self._accept(header, checked)
        except OSError as error:
            if not is_disk_full(error):
                raise
            raise RefusedRequest("disk_full", DISK_FULL) from error
        except RefusedRequest as refused:
            await self._strike(header, refused)
            raise

    # --- before a byte is read ------------------------------------------------------------------

    def _admit(self, header: pb.PushHeader) -> bool:
        """True for a repeat of what was accepted; refused requests raise."""
        state, event = self._engine.state, _event(header)
        if header.caller.run_id != self._engine.store.run_id:
            raise RefusedRequest("run_id", f"this coordinator serves {self._engine.store.run_id}")
        answer = check_push(state, event)
        raise_if_refused(answer)
        if isinstance(answer, Duplicate):
            return True
        if header.theta_digest != state.theta_digest:
            raise RefusedRequest(
                "digest",
                f"site {event.site!r} measures from theta {header.theta_digest[:16]}, the run's "
                f"at round {state.round} is {state.theta_digest[:16]}: fetch the snapshot",
            )
        limit = self._size_limit(event)
        if header.size_bytes > limit or len(header.digest) != 16:
            raise RefusedRequest(
                "shard",
                f"shard {event.shard} of {event.site!r} declares {header.size_bytes} bytes and a "
                f"digest of {len(header.digest)}; at most {limit} fit its rows, digests have 16",
            )
        return False

    def _size_limit(self, event: ShardStored) -> int:
        rows = self._engine.store.layout.shard(event.shard, event.num_shards)
        return sum(codec.HEADER_BYTES + 8 * CHUNK * len(cell) for cell in cells(rows))

    # --- bytes ----------------------------------------------------------------------------------

    async def _write(self, requests: AsyncIterator[pb.PushRequest], header: pb.PushHeader) -> None:
        path = self._partial(header)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._writers[path] = me = object()
        with path.open("ab") as file:
            if header.offset > file.tell():
                raise RefusedRequest(
                    "", f"{file.tell()} bytes of the shard are here, not {header.offset}"
                )
            file.truncate(header.offset)
            self._monitor.resumed(header.offset)
            async for request in requests:
                if self._writers.get(path) is not me:
                    raise RefusedRequest("", "a newer stream uploads this shard")
                await self._write_block(file, request, header)
            await asyncio.to_thread(_sync, file)
        del self._writers[path]

    async def _write_block(
        self, file: BinaryIO, request: pb.PushRequest, header: pb.PushHeader
    ) -> None:
        site = header.caller.site
        self._count(site, "up", "contribution", request)
        data = request.block.data
        if xxhash.xxh3_64_intdigest(data) != request.block.checksum:
            raise RefusedRequest(
                "", f"a block of shard {header.shard} of {site!r} was damaged on the way"
            )
        if file.tell() + len(data) > header.size_bytes:
            raise RefusedRequest("corrupt", f"more than the declared {header.size_bytes} bytes")
        await asyncio.to_thread(file.write, data)
        reach("upload.block_written")

    async def _check(self, header: pb.PushHeader) -> Checked:
        """Digest and payload; the file gets its name only when both are right."""
        partial, store = self._partial(header), self._engine.store
        size = partial.stat().st_size
        if size < header.size_bytes:
            raise RefusedRequest("", f"{size} of {header.size_bytes} bytes are here")
        digest = await asyncio.to_thread(_digest, partial)
        if digest != header.digest:
            partial.unlink()
            raise RefusedRequest(
                "corrupt",
                f"shard {header.shard} of {header.caller.site!r} has digest {digest.hex()[:16]}, "
                f"{header.digest.hex()[:16]} was declared",
            )
        rows = store.layout.shard(header.shard, header.num_shards)
        try:
            checked = await asyncio.to_thread(
                check_contribution, partial, rows, bits=store.config.codec.bits
            )
        except PayloadError as error:
            partial.unlink()
            raise RefusedRequest(
                "payload", f"shard {header.shard} of {header.caller.site!r} is malformed: {error}"
            ) from error
        self._check_magnitude(header, checked)
        return checked

    def _check_magnitude(self, header: pb.PushHeader, checked: Checked) -> None:
        limit = self._engine.store.config.outer.max_value
        if checked.largest <= limit:
            return
        self._partial(header).unlink()
        name = self._engine.store.layout.parameter_at(checked.largest_at).name
        raise RefusedRequest(
            "absurd",
            f"the contribution of {header.caller.site!r} has {checked.largest:g} in {name}; "
            f"outer.max_value allows {limit:g}",
        )

    async def _accept(self, header: pb.PushHeader, checked: Checked) -> pb.PushResponse:
        event = _event(header, norm_sq=checked.norm_sq)
        path = self._engine.store.contribution(
            event.round, event.site, event.incarnation, event.shard
        )
        await asyncio.to_thread(rename_synced, self._partial(header), path)
        reach("upload.renamed")
        answer = await self._engine.submit(event)
        raise_if_refused(answer)
        self._monitor.contribution(checked.num_values, event.size_bytes)
        return pb.PushResponse(duplicate=isinstance(answer, Duplicate))

    async def _strike(self, header: pb.PushHeader, refused: RefusedRequest) -> None:
        """Count what only a faulty site sends; enough of it in a row means quarantine."""
        if refused.reason in ("corrupt", "payload", "absurd"):
            caller = header.caller
            await self._engine.submit(
                ShardRefused(
                    site=caller.site, incarnation=caller.incarnation, reason=refused.reason
                )
            )

    def _partial(self, header: pb.PushHeader) -> Path:
        caller = header.caller
        path = self._engine.store.contribution(
            header.round, caller.site, caller.incarnation, header.shard
        )
        return path.with_name(f"{path.name}.{header.digest.hex()}.partial")


async def _until_stalled(requests: AsyncIterator[pb.PushRequest]) -> AsyncIterator[pb.PushRequest]:
    """The same messages; a peer that sends none for too long ends the stream."""
    iterator = aiter(requests)
    while True:
        try:
            yield await asyncio.wait_for(anext(iterator), STALL_SECONDS)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise RefusedRequest("", f"nothing came for {STALL_SECONDS:.0f} s") from None


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    reach("upload.synced")


def _digest(path: Path) -> bytes:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.digest()


def _event(header: pb.PushHeader, *, norm_sq: float = 0.0) -> ShardStored:
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
        data_cursor=header.data_cursor,
        norm_sq=norm_sq,
    )
