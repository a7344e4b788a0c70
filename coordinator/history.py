"""What happened round after round, for the page, `loco status` and `loco report`.

The times and bytes of rounds are a fold over the journal, so a coordinator that comes back has
them again. What sites tell of a round (loss, phases) is not in the journal, because no decision
depends on it; it is kept in history.sqlite beside it. Without that file a run goes on, and the
plots of its past lack losses and phases.

Bounded: the last 1,000 rounds, 80 kB a site, whatever the length of the run.
"""

from __future__ import annotations

import json
import math
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from coordinator.events import Event, RoundClosed, RoundCommitted, RoundOpened, ShardStored
from loco.metrics import PHASES

MAX_ROUNDS = 1000
# Columns that the journal gives, and those that are stored.
_OF_RUN = ("opened_at", "closed_at", "committed_at", "update_bytes", "num_included")
_OF_RUN_STORED = ("validation_bits_per_byte", "update_norm", "update_density", "support_overlap")
_OF_SITE = ("contribution_bytes", "tokens", "included")
_OF_SITE_STORED = ("train_bits_per_byte", "ef_norm", *PHASES)
RUN = ""  # no site has this name

_SCHEMA = """
CREATE TABLE IF NOT EXISTS told (
    round  INTEGER NOT NULL,
    site   TEXT NOT NULL,    -- empty: of the run
    body   TEXT NOT NULL,    -- column -> value, JSON
    PRIMARY KEY (round, site)
);
"""


class Columns:
    """Numbers by column and round; a ring of MAX_ROUNDS. NaN is "not known"."""

    def __init__(self, names: Iterable[str]) -> None:
        self._index = {name: i for i, name in enumerate(names)}
        # [num_columns, MAX_ROUNDS] fp64: bytes are exact up to 2**53
        self._values: npt.NDArray[np.float64] = np.full((len(self._index), MAX_ROUNDS), np.nan)

    def get(self, name: str, round_: int) -> float:
        return float(self._values[self._index[name], round_ % MAX_ROUNDS])

    def set(self, name: str, round_: int, value: float) -> None:
        self._values[self._index[name], round_ % MAX_ROUNDS] = value

    def add(self, name: str, round_: int, value: float) -> None:
        before = self.get(name, round_)
        self.set(name, round_, value if math.isnan(before) else before + value)

    def clear(self, round_: int) -> None:
        self._values[:, round_ % MAX_ROUNDS] = np.nan

    def series(self, name: str, rounds: range) -> npt.NDArray[np.float64]:
        """Values of consecutive rounds [len(rounds)] fp64."""
        values: npt.NDArray[np.float64] = self._values[
            self._index[name], np.arange(rounds.start, rounds.stop) % MAX_ROUNDS
        ]
        return values

    @property
    def empty(self) -> bool:
        return bool(np.isnan(self._values).all())


class History:
    """Columns of the run and of each site, over the last rounds."""

    def __init__(self, journaled: Iterable[tuple[float, Event]]) -> None:
        """`journaled` is what the journal replays: (Unix seconds, event)."""
        self.run = Columns((*_OF_RUN, *_OF_RUN_STORED))
        self.sites: dict[str, Columns] = {}
        self._stop = 1  # one past the newest round: theta of round 0 is there from the start
        self._incarnations: dict[str, int] = {}  # of the contributions to the open round
        self._told: set[tuple[int, str]] = set()  # not yet written
        for at, event in journaled:
            self.observe(event, at)

    @property
    def rounds(self) -> range:
        """The rounds that are remembered, up to the one whose theta is the newest."""
        return range(max(0, self._stop - MAX_ROUNDS), self._stop)

    def observe(self, event: Event, at: float) -> None:
        """Take up one journaled event of time `at`."""
        match event:
            case RoundOpened():
                if math.isnan(self.run.get("opened_at", event.round)):  # else opened wider
                    self.run.set("opened_at", event.round, at)
            case ShardStored():
                self._stored(event)
            case RoundClosed():
                self.run.set("closed_at", event.round, at)
                self.run.set("num_included", event.round, len(event.included))
                for name in event.included:
                    self._site(name).set("included", event.round, 1)
            case RoundCommitted():
                self.run.set("committed_at", event.round, at)
                self.run.set("update_bytes", event.round, event.update_bytes)
                self._begin(event.round + 1)

    def _begin(self, round_: int) -> None:
        self._stop = round_ + 1
        self._incarnations.clear()
        self.run.clear(round_)
        for name, columns in list(self.sites.items()):
            columns.clear(round_)
            if columns.empty:
                del self.sites[name]

    def _stored(self, event: ShardStored) -> None:
        columns = self._site(event.site)
        if self._incarnations.get(event.site) != event.incarnation:
            self._incarnations[event.site] = event.incarnation
            columns.set("contribution_bytes", event.round, 0)
            columns.set("tokens", event.round, event.tokens)
        columns.add("contribution_bytes", event.round, event.size_bytes)

    def _site(self, name: str) -> Columns:
        if name not in self.sites:
            self.sites[name] = Columns((*_OF_SITE, *_OF_SITE_STORED))
        return self.sites[name]

    # --- what is told, not journaled ------------------------------------------------------------

    def tell(self, site: str, round_: int, **values: float) -> None:
        """Set columns of a site, or of the run (`RUN`); a round out of range is forgotten."""
        if round_ in self.rounds:
            columns = self._site(site) if site else self.run
            for name, value in values.items():
                columns.set(name, round_, value)
            self._told.add((round_, site))

    def tell_phase(self, site: str, round_: int, phase: str, seconds: float) -> None:
        """Add to the time that a site spent in a phase of a round."""
        if round_ in self.rounds:
            self._site(site).add(phase, round_, seconds)
            self._told.add((round_, site))

    def take_told(self) -> list[tuple[int, str, str]]:
        """What was told since the last call, as rows of the table."""
        told, self._told = self._told, set()
        return [
            (round_, site, json.dumps(dict(self._known(round_, site))))
            for round_, site in sorted(told)
            if round_ in self.rounds and (not site or site in self.sites)
        ]

    def restore(self, rows: Iterable[tuple[int, str, str]]) -> None:
        """The inverse of `take_told`."""
        for round_, site, body in rows:
            self.tell(site, round_, **json.loads(body))
        self._told.clear()

    def _known(self, round_: int, site: str) -> Iterator[tuple[str, float]]:
        columns = self.sites[site] if site else self.run
        for name in _OF_SITE_STORED if site else _OF_RUN_STORED:
            value = columns.get(name, round_)
            if not math.isnan(value):
                yield name, value

    # --- reading --------------------------------------------------------------------------------

    def phase_sums(self, site: str, num_rounds: int) -> Mapping[str, float]:
        """Seconds by phase of a site over its last rounds; empty for a site without any."""
        columns = self.sites.get(site)
        if columns is None:
            return {}
        last = self.rounds[-num_rounds:]
        sums = {phase: float(np.nansum(columns.series(phase, last))) for phase in PHASES}
        return {phase: seconds for phase, seconds in sums.items() if seconds}

    def document(self, since: int) -> dict[str, object]:
        """The rounds from `since` on, column by column, as JSON has it; null is "not known"."""
        rounds = range(max(since, self.rounds.start), self.rounds.stop)
        run = (*_OF_RUN, *_OF_RUN_STORED)
        site = ("train_bits_per_byte", "contribution_bytes", "ef_norm", *PHASES)
        return {
            "first_round": rounds.start,
            "num_rounds": len(rounds),
            "run": {name: _plain(self.run.series(name, rounds)) for name in run},
            "sites": {
                name: {column: _plain(columns.series(column, rounds)) for column in site}
                for name, columns in sorted(self.sites.items())
            },
        }


def _plain(values: npt.NDArray[np.float64]) -> list[float | int | None]:
    """Whole numbers and times exact to the millisecond, others with six digits."""
    return [_short(value) for value in values.tolist()]


def _short(value: float) -> float | int | None:
    if math.isnan(value):
        return None
    if value.is_integer():
        return int(value)
    return round(value, 3) if value > 1e3 else float(f"{value:.6g}")


class HistoryFile:
    """history.sqlite: what sites told. One writer; never on the event loop."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")  # a lost second of plots is no loss
        self._db.executescript(_SCHEMA)

    def read(self, rounds: range) -> list[tuple[int, str, str]]:
        with self._lock:
            where = (rounds.start, rounds.stop)
            return self._db.execute(
                "SELECT round, site, body FROM told WHERE round >= ? AND round < ?", where
            ).fetchall()

    def write(self, rows: list[tuple[int, str, str]], oldest_round: int) -> None:
        """Store rows, and forget the rounds before the oldest."""
        with self._lock:
            self._db.execute("BEGIN")
            self._db.executemany("INSERT OR REPLACE INTO told VALUES (?, ?, ?)", rows)
            self._db.execute("DELETE FROM told WHERE round < ?", (oldest_round,))
            self._db.execute("COMMIT")

    def close(self) -> None:
        with self._lock:
            self._db.close()
