"""Making whole shards durable: the last block, sync, checks, and their name among contributions.

In threads, each with all the small shards that have come meanwhile: they cost one visit to it, and
the directory in which they get their names one sync.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

from coordinator.contributions import Checked, check_contribution
from coordinator.events import ShardStored
from coordinator.failpoints import reach
from coordinator.files import rename, sync_directory
from coordinator.monitor import Monitor
from coordinator.refused import RefusedRequest
from coordinator.store import Store
from loco.digest import file_digest
from loco.errors import PayloadError
from loco.outer import rules_at
from loco.wire.protocol import INLINE_BYTES

THREADS = 2  # each decodes a cell: memory must not grow with the number of sites


@dataclass
class Upload:
    """How far a stream has come with a shard."""

    event: ShardStored
    path: Path
    offset: int
    """Bytes that are in the file."""
    last: bytes = b""
    """The block behind them that makes the shard whole; not written yet."""
    whole: bool = False
    resumed: bool = field(init=False)

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
    """Completes uploads, a few at a time."""

    def __init__(self, store: Store, monitor: Monitor) -> None:
        self._store = store
        self._monitor = monitor
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="upload")
        self._busy = 0
        self._waiting: list[_Waiting] = []

    def finish(self, upload: Upload) -> asyncio.Future[Checked]:
        """What the shard holds, once it lies on disk under its name.

        RefusedRequest where it is not as its header says (a whole file is then removed); OSError.
        """
        future: asyncio.Future[Checked] = asyncio.get_running_loop().create_future()
        self._waiting.append((upload, future))
        if self._busy < THREADS:
            self._start()
        return future

    def _start(self) -> None:
        first, *others = self._waiting
        small = [waiting for waiting in others if first[0].small and waiting[0].small]
        batch = [first, *small]
        self._waiting = [waiting for waiting in others if waiting not in small]
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

    # --- in the thread --------------------------------------------------------------------------

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
        event = upload.event
        target = self._store.contribution(
            event.round, event.site, event.incarnation, event.shard, event.digest
        )
        try:
            write_at(upload.path, upload.offset, upload.last)
            checked = self._check(upload)
            rename(upload.path, target)
        except Exception as error:
            return error
        return checked

    def _check(self, upload: Upload) -> Checked:
        event, path = upload.event, upload.path
        size = _sync(path)
        try:
            checked = self._inspect(upload, size)
            self._check_values(event, checked)
        except RefusedRequest:
            if size >= event.size_bytes:
                path.unlink()
            raise
        return checked

    def _inspect(self, upload: Upload, size: int) -> Checked:
        """What the shard holds, if it is as its header says."""
        event, path = upload.event, upload.path
        if size < event.size_bytes:  # a broken connection looks like an early end: no fault of it
            raise RefusedRequest(
                "", f"{size} of {event.size_bytes} bytes are here: go on behind them"
            )
        digest = file_digest(path).hex()
        if digest == event.digest:
            return self._decode(event, path)
        if upload.resumed:  # what was here before may have been torn by a power cut: not its fault
            raise RefusedRequest("", "the bytes here were damaged: send the shard from its start")
        raise RefusedRequest(
            "corrupt",
            f"shard {event.shard} of {event.site!r}: {size} bytes with digest {digest[:16]} came, "
            f"{event.size_bytes} bytes with {event.digest[:16]} were declared",
        )

    def _check_values(self, event: ShardStored, checked: Checked) -> None:
        config, layout = self._store.config, self._store.layout
        if not checked.largest <= config.outer.max_value:  # NaN, too
            name = layout.parameter_at(checked.largest_at).name
            raise RefusedRequest(
                "absurd",
                f"the contribution of {event.site!r} has {checked.largest:g} in {name}; "
                f"outer.max_value allows {config.outer.max_value:g}",
            )

    def _decode(self, event: ShardStored, path: Path) -> Checked:
        config = self._store.config
        rows = self._store.layout.shard(event.shard, event.num_shards)
        rules = rules_at(config.outer, config.codec, event.round)
        try:
            with self._monitor.metrics.codec.decode_seconds.time():
                return check_contribution(path, rows, bits=rules.bits)
        except PayloadError as error:
            raise RefusedRequest(
                "payload", f"shard {event.shard} of {event.site!r} is malformed: {error}"
            ) from error


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


def _sync(path: Path) -> int:
    """Make the bytes durable; their number."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        size = os.fstat(file.fileno()).st_size
    reach("upload.synced")
    return size
