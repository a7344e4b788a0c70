"""The state directory: lock, journal, contributions, updates, snapshots, and theta at work.

    lock                                    held by one coordinator at a time
    journal.sqlite                          events and facts
    contributions/ROUND/SITE.INC.SHARD.XXH  payload bytes, kept until the next snapshot
    incoming/                               uploads in progress; emptied at start
    updates/ROUND                           payload bytes
    snapshots/ROUND/{theta,residual,...}    raw fp32, manifest.json written last
    work/{theta,residual,momentum}          memory-mapped; rebuilt from snapshot and log at start

Files are written aside, synced and renamed: a file that has its name is whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from coordinator.journal import Journal
from loco.config import Config, config_from_json
from loco.digest import chunk_hashes, theta_digest
from loco.errors import ConfigError
from loco.layout import Layout

Array = npt.NDArray[np.float32]


class _Manifest(BaseModel):
    """Written last: a directory that has it is a whole snapshot."""

    theta_digest: str
    buffers: tuple[str, ...]


class Store:
    """One run's state directory, opened and locked. Use `Store.open` or `Store.create`."""

    def __init__(self, directory: Path, lock: BinaryIO, journal: Journal) -> None:
        self.directory = directory
        self.journal = journal
        self._lock = lock
        facts = journal.facts()
        self.run_id = facts["run_id"]
        self.config: Config = config_from_json(facts["config"])
        self.layout = Layout.from_json(facts["layout"])
        self.initial_digest = facts["theta_digest"]
        shutil.rmtree(directory / "incoming", ignore_errors=True)

    # --- opening --------------------------------------------------------------------------------

    @staticmethod
    def exists(directory: Path) -> bool:
        """Whether a run was created here."""
        return (directory / "journal.sqlite").exists()

    @classmethod
    def create(
        cls, directory: Path, *, run_id: str, config: Config, layout: Layout, theta: Array
    ) -> Store:
        """Begin a run: `theta` [num_elements] fp32 becomes round 0 for everyone."""
        lock = _lock(directory)
        for name in ("contributions", "updates", "snapshots", "work"):
            (directory / name).mkdir(exist_ok=True)
        buffers = {"theta": theta, "residual": np.zeros_like(theta)}
        if config.outer.aggregation == "nesterov":
            buffers["momentum"] = np.zeros_like(theta)
        digest = theta_digest(chunk_hashes(theta))
        _write_snapshot(directory / "snapshots" / "0", buffers, digest)
        journal = Journal(directory / "journal.sqlite")
        journal.create(
            {
                "run_id": run_id,
                "config": config.to_json(),
                "layout": layout.to_json(),
                "theta_digest": digest,
            }
        )
        return cls(directory, lock, journal)

    @classmethod
    def open(cls, directory: Path) -> Store:
        """Open an existing run."""
        if not cls.exists(directory):
            raise ConfigError(f"{directory} holds no run: there is no journal.sqlite in it")
        lock = _lock(directory)
        journal = Journal(directory / "journal.sqlite")
        if not journal.facts():
            journal.close()
            lock.close()
            raise ConfigError(
                f"the run in {directory} was never fully created; remove the directory and start it"
            )
        return cls(directory, lock, journal)

    def close(self) -> None:
        self.journal.close()
        self._lock.close()

    # --- theta at work --------------------------------------------------------------------------

    def work(self) -> dict[str, Array]:
        """Memory-mapped buffers [num_elements] fp32, set back to the newest snapshot."""
        source = self._snapshot_dir(self.snapshot_round())
        buffers: dict[str, Array] = {}
        for name in _manifest(source).buffers:
            target = self.directory / "work" / name
            shutil.copyfile(source / name, target)
            buffers[name] = np.memmap(target, np.float32, mode="r+")
        return buffers

    def snapshot_round(self) -> int:
        """Round of the newest snapshot that is whole."""
        return max(
            int(path.name)
            for path in (self.directory / "snapshots").iterdir()
            if path.name.isdigit() and (path / "manifest.json").exists()
        )

    def snapshot_digest(self, round_: int) -> str:
        return _manifest(self._snapshot_dir(round_)).theta_digest

    def snapshot_theta(self, round_: int) -> Path:
        """File of theta at that round: raw little-endian fp32."""
        return self._snapshot_dir(round_) / "theta"

    def save_snapshot(self, round_: int, buffers: dict[str, Array], digest: str) -> None:
        """Write a snapshot, then forget what it makes superfluous."""
        _write_snapshot(self._snapshot_dir(round_), buffers, digest)
        for path in (self.directory / "contributions").iterdir():
            if int(path.name) < round_:
                shutil.rmtree(path)
        snapshots = [p for p in (self.directory / "snapshots").iterdir() if p.name.isdigit()]
        # The one before stays: a site may be downloading it.
        for path in sorted(snapshots, key=lambda p: int(p.name))[:-2]:
            shutil.rmtree(path)

    def _snapshot_dir(self, round_: int) -> Path:
        return self.directory / "snapshots" / str(round_)

    # --- contributions and updates --------------------------------------------------------------

    def contribution(
        self, round_: int, site: str, incarnation: int, shard: int, digest: str
    ) -> Path:
        """Named by its digest too: of two uploads of one key at once, neither harms the other."""
        name = f"{site}.{incarnation}.{shard}.{digest}"
        return self.directory / "contributions" / str(round_) / name

    def receive(self, path: Path) -> Aside:
        """A contribution that is being uploaded; its round's directory may go meanwhile."""
        return Aside(path, where=self.directory / "incoming")

    def update(self, round_: int) -> Path:
        return self.directory / "updates" / str(round_)

    def forget_updates_before(self, round_: int) -> None:
        for path in (self.directory / "updates").iterdir():
            if path.name.isdigit() and int(path.name) < round_:
                path.unlink()


class Aside:
    """A file that appears under its name whole and synced (`commit`), or not at all (`abort`).

    It grows in `where` (same file system; by default beside its place).
    """

    def __init__(self, path: Path, *, where: Path | None = None) -> None:
        directory = where or path.parent
        directory.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._aside = directory / f"{path.name}.{secrets.token_hex(4)}.partial"
        self._file = self._aside.open("wb")

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)

    def commit(self) -> None:
        """Sync and rename."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._aside.rename(self._path)
        _sync_directory(self._path.parent)

    def abort(self) -> None:
        """Remove it, unless it was committed."""
        self._file.close()
        self._aside.unlink(missing_ok=True)


@contextlib.contextmanager
def write_aside(path: Path) -> Iterator[Aside]:
    """Commit at the end of the block, abort where it raises."""
    aside = Aside(path)
    try:
        yield aside
        aside.commit()
    finally:
        aside.abort()


def _lock(directory: Path) -> BinaryIO:
    directory.mkdir(parents=True, exist_ok=True)
    file = (directory / "lock").open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ConfigError(
            f"the state directory {directory} is in use by another coordinator; "
            "stop that one or give another --state"
        ) from error
    return file


def _write_snapshot(directory: Path, buffers: dict[str, Array], digest: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, buffer in buffers.items():
        with write_aside(directory / name) as file:
            file.write(np.ascontiguousarray(buffer).view(np.uint8).data)
    manifest = _Manifest(theta_digest=digest, buffers=tuple(sorted(buffers)))
    with write_aside(directory / "manifest.json") as file:
        file.write(manifest.model_dump_json().encode())


def _manifest(directory: Path) -> _Manifest:
    return _Manifest.model_validate_json((directory / "manifest.json").read_text())


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
