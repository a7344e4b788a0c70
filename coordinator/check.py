"""`loco state check`: verify a state directory offline, file by file."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509

from coordinator import chain
from coordinator.events import RoundCommitted, ShardStored
from coordinator.recovery import recover
from coordinator.store import Store
from loco.chain import FIRST, verify
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
    entries: int = 0
    """Of the chain of digests."""
    signed: int = 0
    """Entries with a sound signature."""
    faults: list[str] = field(default_factory=list)


def check_state(directory: Path, authority: x509.Certificate | None = None) -> Verdict:
    """Check journal, snapshots, contributions, updates and the chain, then replay the run.

    With an `authority` every entry of the chain must be signed by a coordinator of it.

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
            _check_chain(store, verdict, state.round, authority)
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


def _check_chain(
    store: Store, verdict: Verdict, round_: int, authority: x509.Certificate | None
) -> None:
    path = store.directory / chain.FILE
    updates = (p for p in (store.directory / "updates").iterdir() if p.name.isdigit())
    # One beyond the run's round was interrupted by a crash: it is made again.
    files = {("update", int(p.name)): p for p in updates if int(p.name) < round_}
    # One that is gone was named with its snapshot.
    thetas = {("snapshot", s.round): s.theta for s in store.snapshots.all()}
    files |= {key: theta for key, theta in thetas.items() if theta.exists()}
    previous, stated = FIRST, set()
    for entry in chain.read(path):
        fact = entry.fact
        what = f"{path}: {fact.kind} {fact.round}"
        verdict.entries += 1
        if entry.previous != previous:
            verdict.faults.append(f"{what} does not follow the entry before it")
        if fact.run_id != store.run_id:
            verdict.faults.append(f"{what} is of run {fact.run_id!r}")
        if entry.signature or authority is not None:
            try:
                verify(entry, authority)
                verdict.signed += 1
            except LocoError as error:
                verdict.faults.append(f"{path}: {error}")
        previous, key = entry.hash, (fact.kind, fact.round)
        stated.add(key)
        if key in files and chain.sha256_of(files[key]) != fact.sha256:
            verdict.faults.append(f"{files[key]} is not what {path} states")
    if path.exists() or authority is not None:
        missing = sorted(files.keys() - stated)
        verdict.faults += [
            f"{path} lacks {kind} {round_}: if a crash came between, the next start adds it"
            for kind, round_ in missing
        ]


def _check_digest(path: Path, digest: str, verdict: Verdict) -> None:
    if not path.exists():
        verdict.faults.append(f"{path} is missing")
    elif file_digest(path).hex() != digest:
        verdict.faults.append(f"{path} has not the digest that the journal states")
