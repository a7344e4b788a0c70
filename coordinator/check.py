"""`loco state check`: verify a state directory offline, file by file."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.events import RoundCommitted, ShardStored
from coordinator.recovery import recover
from coordinator.store import Store
from loco.digest import file_digest
from loco.errors import LocoError


@dataclass
class Verdict:
    """What a check found."""

    round: int = 0
    theta_digest: str = ""
    snapshots: list[int] = field(default_factory=list)
    events: int = 0
    contributions: int = 0
    updates: int = 0
    faults: list[str] = field(default_factory=list)


def check_state(directory: Path) -> Verdict:
    """Check journal, snapshots, contributions and updates, then replay the run.

    Needs the directory to itself: ConfigError while a coordinator uses it.
    """
    verdict = Verdict()
    try:
        store = Store.open(directory)
    except sqlite3.DatabaseError as error:
        verdict.faults.append(f"journal: {error}")
        return verdict
    try:
        verdict.faults += [f"journal: {fault}" for fault in store.journal.check()]
        _check_snapshots(store, verdict)
        _check_files(store, verdict)
        state, _ = recover(store)
        verdict.round, verdict.theta_digest = state.round, state.theta_digest
    except LocoError as error:
        verdict.faults.append(str(error))
    finally:
        store.close()
    return verdict


def _check_snapshots(store: Store, verdict: Verdict) -> None:
    for snapshot in store.snapshots.all():
        verdict.snapshots.append(snapshot.round)
        verdict.faults += snapshot.faults()


def _check_files(store: Store, verdict: Verdict) -> None:
    for _, event in store.journal.replay(after=0):
        verdict.events += 1
        if isinstance(event, ShardStored):
            path = store.contribution(
                event.round, event.site, event.incarnation, event.shard, event.digest
            )
            # Those from before the oldest snapshot are gone, and nothing needs them.
            if path.parent.exists():
                verdict.contributions += 1
                _check_digest(path, event.digest, verdict)
        if isinstance(event, RoundCommitted) and store.update(event.round).exists():
            verdict.updates += 1
            _check_digest(store.update(event.round), event.update_digest, verdict)


def _check_digest(path: Path, digest: str, verdict: Verdict) -> None:
    if not path.exists():
        verdict.faults.append(f"{path} is missing")
    elif file_digest(path).hex() != digest:
        verdict.faults.append(f"{path} has not the digest that the journal states")
