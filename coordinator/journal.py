"""The journal: every durable event of a run, in order, in one SQLite file (WAL, synced).

An event is in the journal before the state it makes is visible; replaying it is recovery.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

from coordinator.events import DURABLE, Event
from coordinator.failpoints import reach
from loco.errors import LocoError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
    seq   INTEGER PRIMARY KEY AUTOINCREMENT,
    at    REAL NOT NULL,     -- Unix seconds, for people; replay does not read it
    kind  TEXT NOT NULL,     -- class name of coordinator.events
    body  TEXT NOT NULL      -- its fields, JSON
);
CREATE TABLE IF NOT EXISTS facts (
    name  TEXT PRIMARY KEY,  -- what never changes: run_id, config, layout, theta_digest
    value TEXT NOT NULL
);
"""


class Journal:
    """Append-only; safe to call from any thread, one call at a time."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.executescript(_SCHEMA)

    def append(self, event: Event, at: float) -> None:
        """Write one event and sync; `at` in Unix seconds."""
        assert event.durable
        body = json.dumps(dataclasses.asdict(event), separators=(",", ":"))
        reach("journal.before_append")
        with self._lock:
            self._db.execute(
                "INSERT INTO events (at, kind, body) VALUES (?, ?, ?)",
                (at, type(event).__name__, body),
            )
        reach("journal.after_append")

    def replay(self, after: int) -> Iterator[tuple[float, Event]]:
        """Events with a number above `after`, with their times, oldest first."""
        rows = self._db.execute(
            "SELECT at, kind, body FROM events WHERE seq > ? ORDER BY seq", (after,)
        )
        for at, kind, body in rows:
            yield at, _event(kind, body)

    def last_seq(self) -> int:
        """Number of the newest event; 0 before the first. Numbers are never used again."""
        (seq,) = self._db.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()
        return int(seq)

    def forget(self, up_to: int) -> None:
        """Remove the events that a snapshot has made superfluous, the newest never."""
        with self._lock:
            self._db.execute("DELETE FROM events WHERE seq <= ?", (up_to,))

    def check(self) -> list[str]:
        """What SQLite finds wrong with the file; empty when nothing is."""
        rows = [row[0] for row in self._db.execute("PRAGMA integrity_check")]
        return [] if rows == ["ok"] else rows

    def facts(self) -> dict[str, str]:
        """What the run was created with; empty for a new state directory."""
        return dict(self._db.execute("SELECT name, value FROM facts"))

    def create(self, facts: dict[str, str]) -> None:
        """Write the facts of a new run, all or none."""
        with self._lock, self._db:  # which commits, or rolls back
            self._db.execute("BEGIN")
            self._db.executemany("INSERT INTO facts VALUES (?, ?)", facts.items())

    def close(self) -> None:
        with self._lock:
            self._db.close()


def _event(kind: str, body: str) -> Event:
    if kind not in DURABLE:
        raise LocoError(
            f"the journal holds an event {kind!r} that this version of loco does not know; "
            "start the coordinator with the version that wrote it"
        )
    fields = json.loads(body)
    return DURABLE[kind](**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
