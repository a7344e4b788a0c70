"""Numbers by round and site, for the page, `loco status` and `loco report`.

No decision of the run depends on them, so they are not in the journal (which is compacted besides):
they are written to history.sqlite about once a second, and a coordinator that comes back has them
again. A crash loses the last second of plots; without the file the plots begin anew.

Bounded: the last 1,000 rounds and 256 sites, 90 kB a site, whatever the length of the run.
"""

from __future__ import annotations

import json
import logging
import math
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loco.metrics import PHASES

log = logging.getLogger("loco.coordinator")

HISTORY_FILE = "history.sqlite"  # in the state directory
MAX_ROUNDS = 1000
MAX_SITES = 256  # beyond, those that were silent longest are forgotten
RUN = ""  # as the name of a site: the run itself; no site has this name
RUN_COLUMNS = (
    "opened_at",  # Unix seconds, as the next two
    "closed_at",
    "committed_at",
    "num_included",
    "update_bytes",
    "update_norm",
    "update_density",
    "support_overlap",
    "validation_bits_per_byte",
)
SITE_COLUMNS = ("train_bits_per_byte", "contribution_bytes", "ef_norm", *PHASES)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS told (
    round  INTEGER NOT NULL,
    site   TEXT NOT NULL,    -- empty: of the run
    body   TEXT NOT NULL,    -- column -> value, JSON
    PRIMARY KEY (round, site)
);
CREATE TABLE IF NOT EXISTS bytes (  -- that the process before counted; empty after a crash
    site      TEXT NOT NULL,
    direction TEXT NOT NULL,
    kind      TEXT NOT NULL,
    num_bytes INTEGER NOT NULL
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

    def __init__(self) -> None:
        self.run = Columns(RUN_COLUMNS)
        self.sites: dict[str, Columns] = {}
        self._stop = 1  # one past the newest round: theta of round 0 is there from the start
        self._unwritten: set[tuple[int, str]] = set()

    @property
    def rounds(self) -> range:
        """The rounds that are remembered, up to the one whose theta is the newest."""
        return range(max(0, self._stop - MAX_ROUNDS), self._stop)

    def reach(self, round_: int) -> None:
        """The run has come to this round: the oldest ones are forgotten."""
        for new in range(max(self._stop, round_ + 1 - MAX_ROUNDS), round_ + 1):
            for columns in (self.run, *self.sites.values()):
                columns.clear(new)
        self._stop = max(self._stop, round_ + 1)
        self.sites = {name: columns for name, columns in self.sites.items() if not columns.empty}

    def tell(self, site: str, round_: int, **values: float) -> None:
        """Set columns of a site, or of the run (`RUN`); a round that is not remembered is left."""
        if round_ in self.rounds:
            for name, value in values.items():
                self._columns(site).set(name, round_, value)
            self._unwritten.add((round_, site))

    def tell_phase(self, site: str, round_: int, phase: str, seconds: float) -> None:
        """Add to the time that a site spent in a phase of a round."""
        if round_ in self.rounds:
            self._columns(site).add(phase, round_, seconds)
            self._unwritten.add((round_, site))

    def _columns(self, site: str) -> Columns:
        if site == RUN:
            return self.run
        # Ordered by who was told of last, so that the first one is the longest away.
        columns = self.sites.pop(site, None) or Columns(SITE_COLUMNS)
        self.sites[site] = columns
        if len(self.sites) > MAX_SITES:
            del self.sites[next(iter(self.sites))]
        return columns

    # --- to and from the file -------------------------------------------------------------------

    def take_unwritten(self) -> list[tuple[int, str, str]]:
        """What has changed since the last call, as rows of the table."""
        changed, self._unwritten = self._unwritten, set()
        return [
            (round_, site, json.dumps(dict(self._known(round_, site))))
            for round_, site in sorted(changed)
            if round_ in self.rounds and (site == RUN or site in self.sites)
        ]

    def give_back(self, rows: Iterable[tuple[int, str, str]]) -> None:
        """Rows that could not be written, and are to be taken again."""
        self._unwritten |= {(round_, site) for round_, site, _ in rows}

    def restore(self, rows: Iterable[tuple[int, str, str]]) -> None:
        """The inverse of `take_unwritten`; rows are ordered by round."""
        for round_, site, body in rows:
            self.reach(round_)
            self.tell(site, round_, **json.loads(body))
        self._unwritten.clear()

    def _known(self, round_: int, site: str) -> Iterator[tuple[str, float]]:
        columns = self.sites[site] if site else self.run
        for name in SITE_COLUMNS if site else RUN_COLUMNS:
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
        """The rounds from `since` on, column by column, for JSON; None is "not known".

        EF norm and phases are means over the sites, or 64 sites would take megabytes.
        """
        rounds = range(max(since, self.rounds.start), self.rounds.stop)
        return {
            "first_round": rounds.start,
            "num_rounds": len(rounds),
            "run": {name: _plain(self.run.series(name, rounds)) for name in RUN_COLUMNS},
            "mean": {name: _plain(self._mean(name, rounds)) for name in ("ef_norm", *PHASES)},
            "sites": {
                name: {
                    column: _plain(columns.series(column, rounds))
                    for column in ("train_bits_per_byte", "contribution_bytes")
                }
                for name, columns in sorted(self.sites.items())
            },
        }

    def _mean(self, name: str, rounds: range) -> npt.NDArray[np.float64]:
        """Mean over the sites that know it [len(rounds)] fp64."""
        values = np.array([columns.series(name, rounds) for columns in self.sites.values()])
        mean: npt.NDArray[np.float64] = np.full(len(rounds), np.nan)
        if len(values):
            known = (~np.isnan(values)).sum(0)
            np.divide(np.nansum(values, axis=0), known, out=mean, where=known > 0)
        return mean


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
    """history.sqlite. One writer; never on the event loop."""

    def __init__(self, path: Path) -> None:
        """Raises sqlite3.DatabaseError for a file that is something else."""
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")  # a lost second of plots is no loss
            self._db.executescript(_SCHEMA)
        except sqlite3.DatabaseError:
            self._db.close()
            raise

    @classmethod
    def open_or_begin_anew(cls, path: Path) -> HistoryFile:
        """A damaged file is put aside: plots must not keep a run from starting."""
        try:
            return cls(path)
        except sqlite3.DatabaseError as error:
            aside = path.with_suffix(".damaged")
            path.replace(aside)
            log.warning(
                "%s is damaged (%s): the plots begin anew, it is now %s", path, error, aside
            )
            return cls(path)

    def read(self) -> list[tuple[int, str, str]]:
        """All rows, oldest round first."""
        with self._lock:
            return self._db.execute("SELECT round, site, body FROM told ORDER BY round").fetchall()

    def write(self, rows: list[tuple[int, str, str]], oldest_round: int) -> None:
        """Store rows, and forget the rounds before the oldest: all or nothing.

        Raises sqlite3.OperationalError where the disk is full; the next call begins afresh.
        """
        with self._lock, self._db:  # which commits, or rolls back
            self._db.execute("BEGIN")
            self._db.executemany("INSERT OR REPLACE INTO told VALUES (?, ?, ?)", rows)
            self._db.execute("DELETE FROM told WHERE round < ?", (oldest_round,))

    def take_bytes(self) -> dict[tuple[str, str, str], int]:
        """What the process before counted until its orderly end, by site, direction and kind.

        Once only: after a crash counters begin at 0, which Prometheus takes for a restart. A total
        that is lower than the last one scraped would be counted twice.
        """
        with self._lock, self._db:
            self._db.execute("BEGIN")
            rows = self._db.execute("SELECT site, direction, kind, num_bytes FROM bytes").fetchall()
            self._db.execute("DELETE FROM bytes")
        return {(site, direction, kind): num_bytes for site, direction, kind, num_bytes in rows}

    def leave_bytes(self, counted: Mapping[tuple[str, str, str], int]) -> None:
        """For `take_bytes` of the next process."""
        rows = [(*key, num_bytes) for key, num_bytes in counted.items()]
        try:
            with self._lock, self._db:
                self._db.execute("BEGIN")
                self._db.executemany("INSERT INTO bytes VALUES (?, ?, ?, ?)", rows)
        except sqlite3.OperationalError as error:
            log.warning("byte counters will begin at 0 again: %s", error)

    def close(self) -> None:
        with self._lock:
            self._db.close()
