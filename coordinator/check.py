"""`loco state check`: verify a state directory offline, file by file."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.events import RoundCommitted, ShardStored
from coordinator.recovery import recover
from coordinator.store import Store
from loco.digest import file_digest
from loco.errors import ConfigError, LocoError


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

    These are the files that the run is made again from; `incoming/`, `work/` and history.sqlite
    hold nothing that is needed. Needs the directory to itself: ConfigError while a coordinator
    uses it.
    """
    verdict = Verdict()
    with contextlib.ExitStack() as opened:
        try:
            store = Store.open(directory)
            opened.callback(store.close)
            verdict.faults += [f"journal: {fault}" for fault in store.journal.check()]
            _check_snapshots(store, verdict)
            _check_files(store, verdict)
            state, _ = recover(store)
            verdict.round, verdict.theta_digest = state.round, state.theta_digest
        except ConfigError:
            raise
        except LocoError as error:
            verdict.faults.append(str(error))
    return verdict


def _check_snapshots(store: Store, verdict: Verdict) -> None:
    for path in store.snapshots.damaged_manifests():
        verdict.faults.append(f"{path} is not as it was written")
    for snapshot in store.snapshots.all():
        verdict.snapshots.append(snapshot.round)
        verdict.faults += snapshot.faults()


def _check_files(store: Store, verdict: Verdict) -> None:
    snapshots = store.snapshots.all()
    # Contributions from before the oldest snapshot are gone, and nothing needs them.
    oldest = min((snapshot.round for snapshot in snapshots), default=0)
    updates = {r: u.digest for s in snapshots for r, u in s.state.updates.items()}
    for _, event in store.journal.replay(after=0):
        verdict.events += 1
        if isinstance(event, ShardStored):
            path = store.contribution(
                event.round, event.site, event.incarnation, event.shard, event.digest
            )
            if event.round >= oldest or path.exists():
                verdict.contributions += 1
                _check_digest(path, event.digest, verdict)
        if isinstance(event, RoundCommitted):
            updates[event.round] = event.update_digest
    oldest_update = max(updates, default=-1) + 1 - store.config.state.keep_updates
    for round_, digest in sorted(updates.items()):
        if round_ >= oldest_update:
            verdict.updates += 1
            _check_digest(store.update(round_), digest, verdict)


def _check_digest(path: Path, digest: str, verdict: Verdict) -> None:
    if not path.exists():
        verdict.faults.append(f"{path} is missing")
    elif file_digest(path).hex() != digest:
        verdict.faults.append(f"{path} has not the digest that the journal states")
