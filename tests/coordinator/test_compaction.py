"""A long run on a bounded disk: what is forgotten, what is not, and that nothing depends on it.

Compared with: the same run without compaction, in state and theta, and the directory's own size
over time. Run alone: pytest tests/coordinator/test_compaction.py
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support.live import Coordinator, Member, eventually
from support.runs import LAYOUT, config_of, create_store, vector

from coordinator import store as store_module
from coordinator.chain import FILE
from coordinator.check import check_state
from coordinator.measure import directory_bytes
from coordinator.recovery import recover
from coordinator.state import State
from coordinator.store import Store

ROUNDS, EVERY, KEEP_EVENTS = 120, 5, 100
CONFIG = config_of(
    quorum={"min_sites": 1},
    run={"rounds": ROUNDS + 1},
    state={"snapshot_every_rounds": EVERY, "keep_updates": 6},
    codec={"k": 8},
)
RESTARTS = (37, 88)


def train(directory: Path) -> tuple[State, list[int], list[int]]:
    """The run with two restarts on the way: its state, bytes and events by round."""
    coordinator = Coordinator(create_store(directory, CONFIG))
    member = Member(coordinator, "paris")
    member.join(instance="paris")
    member.wait(0)
    num_bytes, num_events = [], []
    for round_ in range(ROUNDS):
        if round_ in RESTARTS:
            coordinator.stop()
            coordinator = Coordinator(Store.open(directory))
            member = Member(coordinator, "paris")
            member.caller.incarnation = 1
        eventually(lambda: coordinator.state.phase == "open", "the round is open")  # noqa: B023
        member.contribute(round_, vector(LAYOUT, round_ % 7, scale=1e-2))
        eventually(lambda: coordinator.state.round == round_ + 1, "it is committed")  # noqa: B023
        due = (round_ + 1) // EVERY * EVERY
        forgotten = coordinator.store.update(round_ - CONFIG.state.keep_updates)
        # Entered last: before that, the old snapshot lies there beside the new one.
        eventually(lambda: coordinator.running.engine.chain.get("snapshot", due), "it is tidy")  # noqa: B023
        eventually(lambda: not forgotten.exists(), "so are the updates")  # noqa: B023
        num_bytes.append(directory_bytes(directory) - growing_bytes(directory))
        num_events.append(sum(1 for _ in coordinator.store.journal.replay(after=0)))
    state = coordinator.state
    coordinator.stop()
    return state, num_bytes, num_events


def write_ahead_bytes(directory: Path) -> int:
    """SQLite's logs grow until a page limit of their own, and then are written over."""
    return sum(path.stat().st_size for path in directory.glob("*.sqlite-wal"))


def growing_bytes(directory: Path) -> int:
    """What is meant to grow: the chain, a line a round; and SQLite's logs, until they turn over."""
    chain = (directory / FILE).stat().st_size
    assert chain < 2000 * (ROUNDS + 1)
    return chain + write_ahead_bytes(directory) + free_bytes(directory)


def free_bytes(directory: Path) -> int:
    """Pages that SQLite keeps for later; how many depends on when it writes its log back."""
    total = 0
    for path in directory.glob("*.sqlite"):
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            pages, size = (
                database.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("freelist_count", "page_size")
            )
            total += pages * size
    return total


def recovered(directory: Path) -> tuple[State, bytes]:
    store = Store.open(directory)
    state, reducer = recover(store)
    theta = np.array(reducer.theta).tobytes()
    store.close()
    return state, theta


def lasting(state: State) -> dict[str, object]:
    """Without what a clock decides."""
    sites = {name: {**vars(site), "heard_at": 0.0} for name, site in state.sites.items()}
    return {**vars(state), "deadline_at": 0.0, "quorum_at": None, "sites": sites}


def test_disk_and_journal_are_bounded_and_replay_gives_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _, all_events = train(tmp_path / "whole")
    monkeypatch.setattr(store_module, "KEEP_EVENTS", KEEP_EVENTS)
    compacted, num_bytes, num_events = train(tmp_path / "compacted")
    # Three events a round; the rest waits for the next snapshot, and the two that are kept.
    assert max(num_events) <= KEEP_EVENTS + 3 * 2 * EVERY + 10
    assert all_events[-1] > 3 * max(num_events) / 2, "else nothing was ever forgotten"
    assert write_ahead_bytes(tmp_path / "compacted") == 0, "a stop writes them back"
    settled = num_bytes[ROUNDS // 2 :]
    assert max(settled) <= 1.02 * max(num_bytes[: ROUNDS // 2])
    assert len(list((tmp_path / "compacted" / "snapshots").iterdir())) == 2
    assert check_state(tmp_path / "compacted").faults == []
    state, theta = recovered(tmp_path / "compacted")
    assert lasting(state) == lasting(compacted) == lasting(whole)
    assert theta == recovered(tmp_path / "whole")[1]
