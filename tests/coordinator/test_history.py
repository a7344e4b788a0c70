"""history.sqlite on a disk that refuses: what was to be written is written when there is room.

Compared with: the rows handed over. SQLite's own limits stand for the disk. Run alone:
pytest tests/coordinator/test_history.py
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from support.play import Play, playing
from support.runs import config_of, create_store

from coordinator.history import HISTORY_FILE, HistoryFile
from coordinator.store import Store


def rows(rounds: range, width: int = 400) -> list[tuple[int, str, str]]:
    return [(round_, "paris", "x" * width) for round_ in rounds]


def full(file: HistoryFile, now: bool) -> None:
    """No room for another page: SQLite then rolls back by itself."""
    file._db.execute(f"PRAGMA max_page_count = {6 if now else 10_000}")


def read_only(file: HistoryFile, now: bool) -> None:
    """No write at all: SQLite leaves the transaction open, as after an error of the disk."""
    file._db.execute(f"PRAGMA query_only = {int(now)}")


@pytest.mark.parametrize("refuse", [full, read_only])
def test_a_write_that_was_refused_leaves_nothing_behind_and_may_be_repeated(
    refuse: Callable[[HistoryFile, bool], None], tmp_path: Path
) -> None:
    file = HistoryFile(tmp_path / HISTORY_FILE)
    file.write(rows(range(2)), 0)
    refuse(file, True)
    for _ in range(2):  # the second one says the same, not that a transaction is open
        with pytest.raises(sqlite3.OperationalError, match=r"disk is full|readonly"):
            file.write(rows(range(2, 200)), 1)
        assert [row[0] for row in file.read()] == [0, 1], "all or nothing"
    refuse(file, False)
    file.write(rows(range(2, 200)), 1)
    assert file.read() == rows(range(1, 200))
    file.close()


def test_byte_counts_go_to_the_next_process_once(tmp_path: Path) -> None:
    counted = {("paris", "up", "contribution"): 7, ("oslo", "down", "snapshot"): 2**40}
    file = HistoryFile(tmp_path / HISTORY_FILE)
    assert file.take_bytes() == {}
    file.leave_bytes(counted)
    file.close()
    again = HistoryFile(tmp_path / HISTORY_FILE)
    assert again.take_bytes() == counted
    again.close()  # as by SIGKILL: nothing is left
    after_a_crash = HistoryFile(tmp_path / HISTORY_FILE)
    assert after_a_crash.take_bytes() == {}
    read_only(after_a_crash, True)
    after_a_crash.leave_bytes(counted)  # a full disk: said in the log, no error at the end
    read_only(after_a_crash, False)
    after_a_crash.close()


def test_counters_of_a_site_go_on_after_an_orderly_restart(tmp_path: Path) -> None:
    config = config_of(run={"rounds": 9}, quorum={"min_sites": 1})

    def counted(play: Play) -> float | None:
        labels = {"site": "paris", "direction": "up", "kind": "control"}
        return play.monitor.registry.get_sample_value("loco_wire_bytes_total", labels)

    with playing(create_store(tmp_path, config)) as play:
        play.join("paris")
        play.monitor.count("paris", "up", "control", 5)
        before = counted(play)
        assert before
    with playing(Store.open(tmp_path)) as play:
        play.join("paris")
        assert counted(play) == before


def test_what_the_full_disk_refused_is_written_with_a_later_turn(tmp_path: Path) -> None:
    config = config_of(run={"rounds": 9}, quorum={"min_sites": 1})
    with playing(create_store(tmp_path, config)) as play:
        file = play.monitor._file
        asyncio.run(play.monitor.housekeeping())
        play.join("paris")
        play.push("paris")
        read_only(file, True)
        with pytest.raises(sqlite3.OperationalError):
            asyncio.run(play.monitor.housekeeping())
        read_only(file, False)
        asyncio.run(play.monitor.housekeeping())
        assert (0, "paris") in [(round_, site) for round_, site, _ in file.read()]
