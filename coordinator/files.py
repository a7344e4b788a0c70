"""Files that appear under their name whole and synced, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from loco.errors import LocoError

_SUFFIX = ".partial"


class Aside:
    """A file being written aside: `commit` gives it its name, `abort` removes it."""

    def __init__(self, path: Path) -> None:
        make_directory(path.parent)
        self._path = path
        self._aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_SUFFIX}")
        self._file = self._aside.open("wb")

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)

    def commit(self) -> None:
        """Sync and rename."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        rename_synced(self._aside, self._path)

    def abort(self) -> None:
        """Remove it, unless it was committed."""
        with contextlib.suppress(OSError):  # closing flushes, which a full disk refuses again
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


def remove_leftovers(directory: Path) -> None:
    """Remove what a process that was killed was writing aside, here and below."""
    for path in directory.rglob(f"*{_SUFFIX}"):
        path.unlink()


def rename_synced(source: Path, target: Path) -> None:
    """Rename within one file system, durably."""
    rename(source, target)
    sync_directory(target.parent)


def rename(source: Path, target: Path) -> None:
    """Rename within one file system; durable after `sync_directory`."""
    make_directory(target.parent)
    source.rename(target)


def make_directory(path: Path) -> None:
    """Make a directory, and those above it, with names that are durable."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def append_synced(path: Path, data: bytes) -> None:
    """Append to a file, durably and wholly: where that fails the file is as it was."""
    with path.open("ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[file.write(rest) :]  # a disk that fills up takes a part
            os.fsync(file.fileno())
        except BaseException:
            file.truncate(end)
            raise


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def is_disk_full(error: Exception) -> bool:
    """ENOSPC or EDQUOT, from the file system or from SQLite."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "disk is full" in str(error)


def has_room(directory: Path) -> bool:
    """Whether SQLite's smallest files fit."""
    return shutil.disk_usage(directory).free >= 1 << 16


@contextlib.contextmanager
def room_in(directory: Path) -> Iterator[None]:
    """What the block cannot write because the disk is full is a LocoError, which says so."""
    try:
        yield
    except (OSError, sqlite3.OperationalError) as error:
        if not is_disk_full(error):
            raise
        raise LocoError(
            f"the disk of {directory} is full ({error}): nothing is lost, make room and start again"
        ) from error
