"""Files that appear under their name whole and synced, or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

_SUFFIX = ".partial"


class Aside:
    """A file being written aside: `commit` gives it its name, `abort` removes it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
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
    target.parent.mkdir(parents=True, exist_ok=True)
    source.rename(target)
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
