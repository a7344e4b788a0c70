"""The state directory of a run.

    lock                                      held by one coordinator at a time
    journal.sqlite                            events and facts
    contributions/ROUND/SITE.INC.SHARD.XXH    payload bytes, until no kept snapshot needs them
    incoming/ROUND/                           uploads in progress, until their round is over
    updates/ROUND                             payload bytes, the last `state.keep_updates` of them
    snapshots/ROUND/                          see coordinator.snapshots
    work/{theta,residual,momentum}            memory-mapped; set back to a snapshot at each start

Files are written aside, synced and renamed: a file that has its name is whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from coordinator.files import remove_leftovers
from coordinator.journal import Journal
from coordinator.snapshots import Snapshot, Snapshots
from coordinator.state import Rules, State, initial_state
from loco.config import Config, config_from_json
from loco.digest import chunk_hashes, theta_digest
from loco.errors import ConfigError
from loco.layout import Layout
from loco.outer import Fragments

Array = npt.NDArray[np.float32]

KEEP_EVENTS = 200_000  # of the journal, for people: recovery needs those since a snapshot only


class Store:
    """One run's state directory, opened and locked. Use `Store.open` or `Store.create`."""

    def __init__(self, directory: Path, lock: BinaryIO, journal: Journal) -> None:
        self.directory = directory
        self.journal = journal
        self.snapshots = Snapshots(directory / "snapshots")
        self._lock = lock
        facts = journal.facts()
        self.run_id = facts["run_id"]
        self.config: Config = config_from_json(facts["config"])
        self.layout = Layout.from_json(facts["layout"])

    # --- opening --------------------------------------------------------------------------------

    @staticmethod
    def exists(directory: Path) -> bool:
        """Whether a run was created here."""
        return (directory / "journal.sqlite").exists()

    @classmethod
    def create(
        cls, directory: Path, *, run_id: str, config: Config, layout: Layout, theta: Array
    ) -> Store:
        """Begin a run: `theta` [num_elements] fp32 becomes round 0 for everyone.

        ConfigError, before anything is there, where the config's fragments do not fit the layout.
        """
        Fragments(config.outer, layout)
        lock = lock_directory(directory)
        for name in ("contributions", "incoming", "updates", "work"):
            (directory / name).mkdir(exist_ok=True)
        buffers = {"theta": theta, "residual": np.zeros_like(theta)}
        if config.outer.aggregation == "nesterov":
            buffers["momentum"] = np.zeros_like(theta)
        digest = theta_digest(chunk_hashes(theta))
        Snapshots(directory / "snapshots").save(
            0,
            buffers,
            theta_digest=digest,
            state=initial_state(rules_of(config), digest),
            journal_seq=0,
        )
        journal = Journal(directory / "journal.sqlite")
        facts = {"run_id": run_id, "config": config.to_json(), "layout": layout.to_json()}
        journal.create(facts)
        return cls(directory, lock, journal)

    @classmethod
    def open(cls, directory: Path) -> Store:
        """Open an existing run.

        Raises ConfigError where there is none, or another process has it; LocoError for a journal
        that is damaged.
        """
        if not cls.exists(directory):
            raise ConfigError(f"{directory} holds no run: there is no journal.sqlite in it")
        with contextlib.ExitStack() as opened:
            lock = opened.enter_context(lock_directory(directory))
            journal = Journal(directory / "journal.sqlite")
            opened.callback(journal.close)
            if not journal.facts():
                raise ConfigError(
                    f"the run in {directory} was never fully created; "
                    "remove the directory and start it"
                )
            store = cls(directory, lock, journal)
            opened.pop_all()
        return store

    def close(self) -> None:
        self.journal.close()
        self._lock.close()

    # --- theta at work --------------------------------------------------------------------------

    def work(self, snapshot: Snapshot) -> dict[str, Array]:
        """Memory-mapped buffers [num_elements] fp32, set back to a snapshot."""
        buffers: dict[str, Array] = {}
        for name in snapshot.manifest.digests:
            target = self.directory / "work" / name
            shutil.copyfile(snapshot.directory / name, target)
            buffers[name] = np.memmap(target, np.float32, mode="r+")
        return buffers

    def tidy(self, snapshot_round: int) -> bool:
        """After recovery from that snapshot: remove what crashes left behind, and damage.

        True if a newer snapshot was damaged.
        """
        remove_leftovers(self.directory)
        return self.snapshots.remove_unsound(snapshot_round)

    def save_snapshot(self, state: State, journal_seq: int, buffers: dict[str, Array]) -> None:
        """Write a snapshot, then forget what no kept snapshot needs."""
        oldest = self.snapshots.save(
            state.round,
            buffers,
            theta_digest=state.theta_digest,
            state=state,
            journal_seq=journal_seq,
        )
        self.journal.forget(min(oldest.manifest.journal_seq, journal_seq - KEEP_EVENTS))
        for path in (self.directory / "contributions").iterdir():
            if path.name.isdigit() and int(path.name) < oldest.round:
                # An upload that was admitted at the last moment may get its name: the next time.
                shutil.rmtree(path, ignore_errors=True)

    # --- contributions and updates --------------------------------------------------------------

    def contribution(
        self, round_: int, site: str, incarnation: int, shard: int, digest: str
    ) -> Path:
        """Named by its digest too: of two uploads of one key at once, neither harms the other."""
        name = f"{site}.{incarnation}.{shard}.{digest}"
        return self.contributions(round_) / name

    def contributions(self, round_: int) -> Path:
        """Directory of a round's contributions."""
        return self.directory / "contributions" / str(round_)

    def incoming(self, round_: int, name: str) -> Path:
        """Where an upload grows; apart from the contributions, whose directory may go meanwhile."""
        return self.directory / "incoming" / str(round_) / name

    def incoming_sizes(self, round_: int, site: str) -> dict[Path, int]:
        """Bytes of a site's uploads of a round that are not finished, of all its incarnations."""
        sizes: dict[Path, int] = {}
        # What is not there yet, or vanishes meanwhile, takes no room.
        with (
            contextlib.suppress(FileNotFoundError),
            os.scandir(self.directory / "incoming" / str(round_)) as entries,
        ):
            for entry in entries:
                if entry.name.startswith(f"{site}."):
                    sizes[Path(entry.path)] = entry.stat().st_size
        return sizes

    def update(self, round_: int) -> Path:
        return self.directory / "updates" / str(round_)

    def forget_before(self, round_: int) -> None:
        """After a commit: uploads for closed rounds and updates that nobody may ask for go."""
        for path in (self.directory / "incoming").iterdir():
            if path.name.isdigit() and int(path.name) < round_:
                # A stream admitted at the last moment may write there: then the next time.
                shutil.rmtree(path, ignore_errors=True)
        for path in (self.directory / "updates").iterdir():
            if path.name.isdigit() and int(path.name) < round_ - self.config.state.keep_updates:
                path.unlink()


def lock_directory(directory: Path) -> BinaryIO:
    """Hold the directory for this process, or raise ConfigError; ends with the process."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / "lock").open("wb")
    except OSError as error:  # a file in its way, no permission, read-only, full
        reason = error.strerror or "it cannot be used"
        if not directory.is_dir():
            reason = f"{error.filename}: {reason}"
        raise ConfigError(
            f"{directory} cannot be a state directory ({reason}): give another --state, a "
            "directory that this user may write to or make"
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ConfigError(
            f"the state directory {directory} is in use by another coordinator; "
            "stop that one or give another --state"
        ) from error
    return file


def rules_of(config: Config) -> Rules:
    """The part of the config that the round machine obeys."""
    return Rules(
        rounds=config.run.rounds,
        min_sites=config.quorum.min_sites,
        grace_seconds=config.quorum.grace_seconds,
        deadline_seconds=config.quorum.deadline_seconds,
        dead_after_seconds=config.quorum.dead_after_seconds,
        inner_steps=config.inner.steps,
        quarantine_after=config.quorum.quarantine_after,
        keep_updates=config.state.keep_updates,
    )
