"""Taking the blocks of a shard and checking them while others come; making it durable at its end.

What is long is checked as it grows, so that after its last byte it only has to be synced and to get
its name among contributions. Small shards that come at once share a visit to a thread, and one sync
of the directory in which they get their names.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

from coordinator.events import ShardStored
from coordinator.failpoints import reach
from coordinator.files import rename, sync_directory
from coordinator.inspection import Checked, Inspection
from coordinator.monitor import Monitor
from coordinator.refused import RefusedRequest
from coordinator.store import Store
from loco.errors import PayloadError
from loco.outer import rules_at
from loco.wire.protocol import INLINE_BYTES

THREADS = 2  # each decodes a payload: memory must not grow with the number of sites
SYNCS = 8  # these wait for the disk, which syncs several files in the time of one


@dataclass
class Upload:
    """How far a stream has come with a shard; made by `Finisher.begin`."""

    event: ShardStored
    path: Path
    offset: int
    """Bytes that are in the file."""
    inspection: Inspection
    last: bytes = b""
    """The block behind them that makes the shard whole; not written yet."""
    whole: bool = False
    resumed: bool = field(init=False)
    check_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.resumed = self.offset > 0
        self.whole = self.offset == self.event.size_bytes

    @property
    def small(self) -> bool:
        """Whether others may wait for it."""
        return self.event.size_bytes <= INLINE_BYTES


Outcome: TypeAlias = Checked | Exception
_Waiting: TypeAlias = "tuple[Upload, asyncio.Future[Checked]]"


class Finisher:
    """Writes, checks and completes uploads, a few at a time."""

    def __init__(self, store: Store, monitor: Monitor) -> None:
        self._store = store
        self._monitor = monitor
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="upload")
        self._syncs = ThreadPoolExecutor(SYNCS, thread_name_prefix="sync")
        self._busy = 0
        self._waiting: list[_Waiting] = []

    def begin(self, event: ShardStored, path: Path, offset: int) -> Upload:
        """A stream begins behind `offset` bytes of a shard."""
        config = self._store.config
        rows = self._store.layout.shard(event.shard, event.num_shards)
        rules = rules_at(config.outer, config.codec, event.round)
        inspection = Inspection(path, rows, bits=rules.bits)
        return Upload(event, path, offset, inspection)

    async def write(self, upload: Upload, data: bytes) -> None:
        """Append a block that is not the last one; look at what has come when it is worth it."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, write_at, upload.path, upload.offset, data)
        upload.offset += len(data)
        if upload.offset >= upload.inspection.due:
            await loop.run_in_executor(self._threads, self._look, upload)

    def finish(self, upload: Upload) -> asyncio.Future[Checked]:
        """What the shard holds, once it lies on disk under its name.

        RefusedRequest where it is not as its header says (a whole file is then removed); OSError.
        """
        if not upload.small:
            return asyncio.ensure_future(self._finish_long(upload))
        future: asyncio.Future[Checked] = asyncio.get_running_loop().create_future()
        self._waiting.append((upload, future))
        if self._busy < THREADS:
            self._start()
        return future

    async def _finish_long(self, upload: Upload) -> Checked:
        loop = asyncio.get_running_loop()
        checked = await loop.run_in_executor(self._threads, self._check, upload)
        await loop.run_in_executor(self._syncs, self._name_durably, upload)
        return checked

    def _start(self) -> None:
        batch, self._waiting = self._waiting, []
        self._busy += 1
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._finish, batch)
        work.add_done_callback(partial(self._finished, batch))

    def _finished(self, batch: Sequence[_Waiting], work: asyncio.Future[list[Outcome]]) -> None:
        self._busy -= 1
        for (_, future), outcome in zip(batch, work.result(), strict=True):
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
        if self._waiting:
            self._start()

    # --- in threads -----------------------------------------------------------------------------

    def _finish(self, batch: Sequence[_Waiting]) -> list[Outcome]:
        outcomes = [self._finish_one(upload) for upload, _ in batch]
        sound = [
            upload.event.round
            for (upload, _), outcome in zip(batch, outcomes, strict=True)
            if isinstance(outcome, Checked)
        ]
        try:
            for round_ in set(sound):
                sync_directory(self._store.contributions(round_))
        except OSError as error:
            return [error if isinstance(outcome, Checked) else outcome for outcome in outcomes]
        for _ in sound:
            reach("upload.renamed")
        return outcomes

    def _finish_one(self, upload: Upload) -> Outcome:
        """All but the sync of its name. An error is the answer to this shard, not to the others."""
        try:
            checked = self._check(upload)
            self._name(upload)
        except Exception as error:
            return error
        return checked

    def _name(self, upload: Upload) -> None:
        """Make the bytes durable and give them their name; durable after `sync_directory`."""
        event = upload.event
        target = self._store.contribution(
            event.round, event.site, event.incarnation, event.shard, event.digest
        )
        _sync(upload.path)
        rename(upload.path, target)

    def _name_durably(self, upload: Upload) -> None:
        self._name(upload)
        sync_directory(self._store.contributions(upload.event.round))
        reach("upload.renamed")

    def _look(self, upload: Upload) -> None:
        started = time.perf_counter()
        upload.inspection.advance(upload.offset)
        upload.check_seconds += time.perf_counter() - started

    def _check(self, upload: Upload) -> Checked:
        """Write the last block; what the shard holds, if it is as its header says."""
        write_at(upload.path, upload.offset, upload.last)
        size = upload.offset + len(upload.last)
        if size < upload.event.size_bytes:  # a broken connection: no fault of the site
            raise RefusedRequest(
                "", f"{size} of {upload.event.size_bytes} bytes are here: go on behind them"
            )
        try:
            checked = self._inspect(upload)
            self._check_values(upload.event, checked)
        except RefusedRequest:
            upload.path.unlink()
            raise
        return checked

    def _inspect(self, upload: Upload) -> Checked:
        event, started = upload.event, time.perf_counter()
        digest = upload.inspection.finish(event.size_bytes)
        upload.check_seconds += time.perf_counter() - started
        self._monitor.metrics.codec.decode_seconds.observe(upload.check_seconds)
        if digest == event.digest:
            return self._result(upload)
        if upload.resumed:  # what was here before may have been torn by a power cut: not its fault
            raise RefusedRequest("", "the bytes here were damaged: send the shard from its start")
        raise RefusedRequest(
            "corrupt",
            f"shard {event.shard} of {event.site!r}: {event.size_bytes} bytes with digest "
            f"{digest[:16]} came, with {event.digest[:16]} they were declared",
        )

    def _result(self, upload: Upload) -> Checked:
        try:
            return upload.inspection.result()
        except PayloadError as error:
            event = upload.event
            raise RefusedRequest(
                "payload", f"shard {event.shard} of {event.site!r} is malformed: {error}"
            ) from error

    def _check_values(self, event: ShardStored, checked: Checked) -> None:
        config, layout = self._store.config, self._store.layout
        if not checked.largest <= config.outer.max_value:  # NaN, too
            name = layout.parameter_at(checked.largest_at).name
            raise RefusedRequest(
                "absurd",
                f"the contribution of {event.site!r} has {checked.largest:g} in {name}; "
                f"outer.max_value allows {config.outer.max_value:g}",
            )


def write_at(path: Path, offset: int, data: bytes) -> None:
    """Write behind the first `offset` bytes, and cut off what was there: the stream before may have
    written on after it was asked for the offset."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        if offset > file.tell():
            raise RefusedRequest("", f"{file.tell()} bytes of the shard are here, not {offset}")
        file.truncate(offset)
        file.write(data)  # at the end, wherever that is
    reach("upload.block_written")


def _sync(path: Path) -> None:
    """Make the bytes durable."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    reach("upload.synced")
