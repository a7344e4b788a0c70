"""Receiving one shard of a contribution: header, blocks, checks, disk, and only then the answer.

Bytes gather in `incoming/`, under a name with their digest; a stream that breaks off leaves them
there, and the next one goes on behind them. `coordinator.finish` writes and checks them as they
come, and makes the whole shard durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path

from google.protobuf.message import Message

from coordinator.admission import check_push
from coordinator.engine import DISK_FULL, Engine
from coordinator.events import Duplicate, ShardRefused, ShardStored
from coordinator.files import is_disk_full
from coordinator.finish import Finisher, Upload
from coordinator.inspection import Checked
from coordinator.monitor import Monitor
from coordinator.refused import RefusedRequest, check_run, raise_refusal
from loco import codec
from loco.config import Config
from loco.layout import CHUNK, cells
from loco.wire.blocks import is_sound
from loco.wire.v1 import coordinator_pb2 as pb

Count = Callable[[str, str, str, Message], None]

DIGEST_BYTES = 16  # XXH3-128
STALL_SECONDS = 60.0  # without a message: the stream ends, what came stays
SLOW_AFTER_SECONDS = 60.0  # from then on a stream must have kept up with the least rate


@dataclass
class _Writer:
    """One stream that writes a file; a newer one may take its place until it finishes."""

    site: str
    size_bytes: int
    """Declared: the disk that it may come to take."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    superseded: bool = False
    finishing: bool = False

    async def idle(self) -> None:
        """Return when no write is in progress."""
        async with self.lock:
            pass


class Uploads:
    """All Push streams of this process."""

    def __init__(self, engine: Engine, monitor: Monitor, count: Count) -> None:
        self._engine = engine
        self._monitor = monitor
        self._count = count
        self._limits = engine.store.config.limits
        self._writers: dict[Path, _Writer] = {}
        self._stored: Counter[tuple[int, str]] = Counter()  # round, site -> bytes of whole shards
        self._finisher = Finisher(engine.store, monitor)

    def offset(self, header: pb.PushHeader) -> int:
        """Bytes of this shard that are here already."""
        if len(header.digest) != DIGEST_BYTES:
            raise RefusedRequest(
                "shard", f"the digest has {len(header.digest)} bytes: digests have {DIGEST_BYTES}"
            )
        try:
            return min(self._incoming(header).stat().st_size, header.size_bytes)
        except FileNotFoundError:
            return 0

    async def receive(self, requests: AsyncIterator[pb.PushRequest]) -> pb.PushResponse:
        """Accept or refuse the shard; a repeat gets the stored answer without its bytes."""
        requests = _until_stalled(requests, self._limits.upload_bytes_per_second)
        first = await anext(requests, pb.PushRequest())
        header = first.header
        self._count(header.caller.site, "up", "contribution", first)
        if not first.HasField("header"):
            raise RefusedRequest("corrupt", "a push begins with its header")
        event = _event(header)
        duplicate = self._admit(header, event)
        if not duplicate:
            try:
                duplicate = await self._receive(first, requests, event)
            except OSError as error:
                if not is_disk_full(error):
                    raise
                raise RefusedRequest("disk_full", DISK_FULL) from error
            except RefusedRequest as refused:
                await self._strike(event, refused)
                raise
        response = pb.PushResponse(duplicate=duplicate)
        self._count(event.site, "down", "control", response)
        return response

    async def _receive(
        self, first: pb.PushRequest, requests: AsyncIterator[pb.PushRequest], event: ShardStored
    ) -> bool:
        header, path = first.header, self._incoming(first.header)
        before, writer = self._take(path, event)
        work: asyncio.Future[Checked] | None = None
        try:
            if before is not None:
                async with writer.lock:  # who comes next waits for this one
                    await _to_its_end(before.idle())
            upload = self._finisher.begin(event, path, header.offset)
            await self._write(first, requests, upload, writer)
            work = self._finisher.finish(upload)
            work.add_done_callback(lambda done: self._count_stored(event, done))
            return await self._accept(event, await asyncio.shield(work))
        except FileNotFoundError:
            answer = check_push(self._engine.state, event)
            raise_refusal(answer)  # the round is over, and its uploads were tidied away
            if not isinstance(answer, Duplicate):
                raise
            return True
        finally:
            self._release(path, writer, work)

    def _release(
        self, path: Path, writer: _Writer, work: asyncio.Future[Checked] | None = None
    ) -> None:
        """Others may write the file once the thread that has it is done; its caller may be gone."""
        if work is not None and not work.done():
            work.add_done_callback(lambda _: self._release(path, writer))
        elif self._writers.get(path) is writer:
            del self._writers[path]

    # --- before a byte is read ------------------------------------------------------------------

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
        if header.size_bytes > limit or len(header.digest) != DIGEST_BYTES:
            raise RefusedRequest(
                "shard",
                f"shard {event.shard} of {event.site!r} declares {header.size_bytes} bytes and a "
                f"digest of {len(header.digest)}; at most {limit} fit its rows, digests have "
                f"{DIGEST_BYTES}",
            )
        self._check_weight(event)
        self._check_quota(event, self._incoming(header))
        return False

    def _check_weight(self, event: ShardStored) -> None:
        """A site must not make itself heavier than its inner steps can be."""
        config, state = self._engine.store.config, self._engine.state
        most_steps = config.inner.max_local_steps + state.inner_steps
        per_step = most_tokens_per_step(config)
        enough = per_step is None or event.tokens <= event.inner_steps * per_step
        if event.inner_steps <= most_steps and enough:
            return
        allowed = "any number" if per_step is None else per_step
        raise RefusedRequest(
            "shard",
            f"shard {event.shard} of {event.site!r} states {event.tokens} tokens in "
            f"{event.inner_steps} inner steps; allowed are {allowed} of tokens a step (data.batch, "
            f"model.seq_len, limits.tokens_per_step) and {most_steps} steps a round",
        )

    def _check_quota(self, event: ShardStored, path: Path) -> None:
        """Uploads that a site begins, at once or one after the other, must not fill the disk."""
        layout, limits = self._engine.store.layout, self._limits
        most = int(limits.uploads_per_round * (8 * layout.num_elements + codec.HEADER_BYTES))
        took = self._engine.store.incoming_sizes(event.round, event.site)
        for other, writer in self._writers.items():  # one may declare less than is there already
            if writer.site == event.site:
                took[other] = max(took.get(other, 0), writer.size_bytes)
        needed = max(event.size_bytes, took.pop(path, 0))  # it goes on, or takes its place
        used = sum(took.values()) + self._stored[event.round, event.site]
        if used + needed > most:
            raise RefusedRequest(
                "quota",
                f"uploads of {event.site!r} for round {event.round} take {used} bytes, and "
                f"{needed} more are too many: limits.uploads_per_round = "
                f"{limits.uploads_per_round:g} allows {most}; wait for the next round",
            )

    def _size_limit(self, event: ShardStored) -> int:
        rows = self._engine.store.layout.shard(event.shard, event.num_shards)
        return sum(codec.HEADER_BYTES + 8 * CHUNK * len(cell) for cell in cells(rows))

    # --- bytes ----------------------------------------------------------------------------------

    def _take(self, path: Path, event: ShardStored) -> tuple[_Writer | None, _Writer]:
        """Become the stream that writes the file; one that writes already has lost its peer.

        At once, so that the quota counts it: a write of the one before may be in progress still.
        """
        before = self._writers.get(path)
        if before is not None:
            if before.finishing:
                raise RefusedRequest("", "this shard is complete and being checked")
            before.superseded = True
        writer = self._writers[path] = _Writer(event.site, event.size_bytes)
        return before, writer

    async def _write(
        self,
        first: pb.PushRequest,
        requests: AsyncIterator[pb.PushRequest],
        upload: Upload,
        writer: _Writer,
    ) -> None:
        """Take the blocks as they come, until the shard is whole or the stream ends."""
        if first.HasField("block"):
            await self._take_block(first.block, upload, writer)
        while not upload.whole:
            request = await anext(requests, None)
            if request is None:
                break
            event = upload.event
            self._count(event.site, "up", "contribution", request)
            await self._engine.heard(event.site, event.incarnation)
            raise_refusal(check_push(self._engine.state, event))  # the round may have closed
            await self._take_block(request.block, upload, writer)
        async with writer.lock:  # a stream whose client went away ends like any other
            _check_current(writer)
            writer.finishing = True

    async def _take_block(self, block: pb.Block, upload: Upload, writer: _Writer) -> None:
        data = _sound_data(block, upload.event, room=upload.event.size_bytes - upload.offset)
        async with writer.lock:
            _check_current(writer)
            if upload.offset + len(data) == upload.event.size_bytes:
                upload.last = data
                upload.whole = True
            else:
                await _to_its_end(self._finisher.write(upload, data))

    # --- answer ----------------------------------------------------------------------------------

    async def _accept(self, event: ShardStored, checked: Checked) -> bool:
        """Journal the shard, whose file has its name; True for a repeat."""
        self._monitor.contribution(event, checked.num_values)
        answer = await self._engine.submit(replace(event, norm_sq=checked.norm_sq))
        raise_refusal(answer)
        return isinstance(answer, Duplicate)

    def _count_stored(self, event: ShardStored, finished: asyncio.Future[Checked]) -> None:
        """Also where nobody waits for the answer any more: the file is there. Of this round and
        later ones; a restart begins anew."""
        if finished.cancelled() or finished.exception() is not None:
            return
        round_ = self._engine.state.round
        for key in [key for key in self._stored if key[0] < round_]:
            del self._stored[key]
        self._stored[event.round, event.site] += event.size_bytes

    async def _strike(self, event: ShardStored, refused: RefusedRequest) -> None:
        """Count what only a faulty site sends; enough of it in a row means quarantine.

        A rank whose shard came behind the last one that counted hears that its site is out.
        """
        if refused.reason in ("corrupt", "payload", "absurd"):
            strike = ShardRefused(
                site=event.site,
                incarnation=event.incarnation,
                round=event.round,
                shard=event.shard,
                data_cursor=event.data_cursor,
                reason=refused.reason,
            )
            raise_refusal(await self._engine.submit(strike))

    def _incoming(self, header: pb.PushHeader) -> Path:
        """The digest in the name keeps uploads of other contents apart."""
        caller = header.caller
        name = f"{caller.site}.{caller.incarnation}.{header.shard}.{header.digest.hex()}"
        return self._engine.store.incoming(header.round, name)


def most_tokens_per_step(config: Config) -> int | None:
    """What a site may state as its weight, an inner step; None: anything."""
    if config.limits.tokens_per_step is not None:
        return config.limits.tokens_per_step
    if config.model.file:  # a loop of its own chooses its batches
        return None
    return config.data.batch * config.model.seq_len


def _check_current(writer: _Writer) -> None:
    if writer.superseded:
        raise RefusedRequest("", "a newer stream uploads this shard")


async def _until_stalled(
    requests: AsyncIterator[pb.PushRequest], least_rate: float
) -> AsyncIterator[pb.PushRequest]:
    """The same messages; a peer that sends none for too long, or drop by drop, ends the stream."""
    iterator = aiter(requests)
    began, received = time.monotonic(), 0
    while True:
        try:
            async with asyncio.timeout(STALL_SECONDS):
                request = await anext(iterator)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise RefusedRequest(
                "slow", f"nothing came for {STALL_SECONDS:.0f} s: go on behind what is here"
            ) from None
        received += len(request.block.data)
        elapsed = time.monotonic() - began
        if received < least_rate * (elapsed - SLOW_AFTER_SECONDS):
            raise RefusedRequest(
                "slow",
                f"{received} bytes came in {elapsed:.0f} s, limits.upload_bytes_per_second asks "
                f"for {least_rate:g} a second: go on behind them over a better link",
            )
        yield request


def _sound_data(block: pb.Block, event: ShardStored, *, room: int) -> bytes:
    """The bytes of a block, which were not damaged and fit."""
    if not is_sound(block):
        raise RefusedRequest("", f"a block of {event.site!r} was damaged on the way")
    if len(block.data) > room:
        raise RefusedRequest(
            "corrupt",
            f"shard {event.shard} of {event.site!r}: more bytes came than the "
            f"{event.size_bytes} bytes that were declared",
        )
    return block.data


async def _to_its_end(work: Coroutine[None, None, None]) -> None:
    """A caller that is cancelled waits for the work all the same: nobody else may have the file
    before, or the last write of a stream that is gone would hit what the next one has written."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait((task,))
        raise


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
        data_cursor=header.data_cursor,
    )
