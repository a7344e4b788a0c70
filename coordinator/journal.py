"""The journal: every durable event of a run, in order, in one SQLite file (WAL, synced).

An event is in the journal before the state it makes is visible; replaying it is recovery.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from coordinator.events import DURABLE, Event
from coordinator.failpoints import reach
from coordinator.files import has_room
from loco.errors import LocoError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
    seq   INTEGER PRIMARY KEY AUTOINCREMENT,
    at    REAL NOT NULL,     -- Unix seconds, for people; replay does not read it
    kind  TEXT NOT NULL,     -- class name of coordinator.events
    body  TEXT NOT NULL,     -- its fields, JSON
    digest TEXT NOT NULL     -- XXH3-64 of at, kind and body: SQLite does not notice a changed byte
);
CREATE TABLE IF NOT EXISTS facts (
    name  TEXT PRIMARY KEY,  -- what never changes: run_id, config, layout
    value TEXT NOT NULL,
    digest TEXT NOT NULL     -- XXH3-64 of name and value
);
"""


_TIGHT = (",", ":")


class Journal:
    """Append-only; safe to call from any thread, one call at a time."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA)
        except sqlite3.DatabaseError as error:
            self._db.close()
            if not has_room(path.parent):  # which SQLite calls an I/O error
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
            raise LocoError(f"the journal {path} cannot be opened: {error}") from error

    def append(self, events: Sequence[Event], at: float) -> None:
        """Write events in order, all or none, and sync once; `at` in Unix seconds."""
        rows = [(at, *_row(event)) for event in events]
        reach("journal.before_append")
        with self._lock, self._db:  # which commits, or rolls back
            self._db.execute("BEGIN")
            self._db.executemany(
                "INSERT INTO events (at, kind, body, digest) VALUES (?, ?, ?, ?)",
                [(*row, _digest(*row)) for row in rows],
            )
        reach("journal.after_append")

    def replay(self, after: int) -> Iterator[tuple[float, Event]]:
        """Events with a number above `after`, with their times, oldest first.

        Raises LocoError where one is not as it was written.
        """
        for seq, at, kind, body, digest in self._rows(after):
            if digest != _digest(at, kind, body):
                raise LocoError(f"event {seq} of the journal is damaged; restore a copy of it")
            yield at, _event(kind, body)

    def _rows(self, after: int) -> Iterator[tuple[int, float, str, str, str]]:
        columns = "seq, at, kind, body, digest"
        return self._read(f"SELECT {columns} FROM events WHERE seq > ? ORDER BY seq", after)

    def _read(self, query: str, *values: object) -> Iterator[tuple[Any, ...]]:
        try:
            yield from self._db.execute(query, values)
        except sqlite3.DatabaseError as error:
            raise LocoError(f"the journal is damaged: {error}; restore a copy of it") from error

    def last_seq(self) -> int:
        """Number of the newest event; 0 before the first. Numbers are never used again."""
        (seq,) = self._db.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()
        return int(seq)

    def forget(self, up_to: int) -> None:
        """Remove the events that a snapshot has made superfluous, the newest never."""
        with self._lock:
            self._db.execute("DELETE FROM events WHERE seq <= ?", (up_to,))

    def check(self) -> list[str]:
        """What is wrong with the file; empty when nothing is."""
        rows = [str(row[0]) for row in self._read("PRAGMA integrity_check")]
        return ([] if rows == ["ok"] else rows) + [
            f"event {seq} is damaged"
            for seq, at, kind, body, digest in self._rows(after=0)
            if digest != _digest(at, kind, body)
        ]

    def facts(self) -> dict[str, str]:
        """What the run was created with; empty for a new state directory.

        Raises LocoError where one is not as it was written.
        """
        facts = {}
        for name, value, digest in self._read("SELECT name, value, digest FROM facts"):
            if digest != _digest(name, value):
                raise LocoError(f"{name!r} in the journal is damaged; restore a copy of it")
            facts[name] = value
        return facts

    def create(self, facts: dict[str, str]) -> None:
        """Write the facts of a new run, all or none."""
        with self._lock, self._db:  # which commits, or rolls back
            self._db.execute("BEGIN")
            self._db.executemany(
                "INSERT INTO facts VALUES (?, ?, ?)",
                [(name, value, _digest(name, value)) for name, value in facts.items()],
            )

    def close(self) -> None:
        with self._lock:
            self._db.close()


def _digest(*fields: object) -> str:
    return xxhash.xxh3_64_hexdigest(repr(fields).encode())


def _row(event: Event) -> tuple[str, str]:
    """Kind and body."""
    assert event.durable
    return type(event).__name__, json.dumps(dataclasses.asdict(event), separators=_TIGHT)


def _event(kind: str, body: str) -> Event:
    if kind not in DURABLE:
        raise LocoError(
            f"the journal holds an event {kind!r} that this version of loco does not know; "
            "start the coordinator with the version that wrote it"
        )
    fields = json.loads(body)
    return DURABLE[kind](**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
