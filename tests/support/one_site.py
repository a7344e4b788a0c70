"""Runs in which one real site is enough for a round, so that a test can end its life and go on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from chaos.numpy_site import NumpySite
from chaos.runs import exact_run
from support.live import Coordinator, coordinating

from coordinator.events import Event, RoundCommitted, ShardStored
from coordinator.store import Store
from loco.config import Config
from loco.model import build_model, layout_of, pack
from worker.exchange import Exchange, Staged

ROUNDS = 7
H = 2
IMPATIENT = {  # rounds close without a site that is away
    "min_sites": 1,
    "grace_seconds": 0.1,
    "heartbeat_seconds": 0.5,
    "dead_after_seconds": 1.0,
}


def config_of_run(**changes: dict[str, Any]) -> Config:
    """One site is enough for a round; the snapshot of round 4 is the newest one for long."""
    raw = exact_run(seed=5, rounds=ROUNDS)
    raw["quorum"]["min_sites"] = 1
    raw["state"] = {"snapshot_every_rounds": 4, "keep_updates": 10}
    for section, keys in changes.items():
        raw[section] |= keys
    return Config.model_validate(raw)


def create(directory: Path, config: Config) -> Store:
    """The state directory of a new run."""
    model = build_model(config.model, seed=config.run.seed)
    layout = layout_of(model)
    return Store.create(
        directory, run_id="rejoin", config=config, layout=layout, theta=pack(model, layout)
    )


@contextlib.contextmanager
def run_of(directory: Path, config: Config) -> Iterator[Coordinator]:
    """A new run, served while the block runs."""
    with coordinating(create(directory / "state", config)) as coordinator:
        yield coordinator


def events_of(coordinator: Coordinator) -> list[Event]:
    """The journal."""
    return [event for _, event in coordinator.store.journal.replay(after=0)]


def digests(coordinator: Coordinator) -> dict[int, str]:
    """Digest of theta after each committed round."""
    events = events_of(coordinator)
    return {e.round: e.theta_digest for e in events if isinstance(e, RoundCommitted)}


def stored(coordinator: Coordinator) -> list[ShardStored]:
    """What sites contributed."""
    return [e for e in events_of(coordinator) if isinstance(e, ShardStored)]


def let_others_make_rounds(coordinator: Coordinator, *, until_round: int) -> None:
    """Oslo alone takes the run there, and leaves."""
    oslo = NumpySite(coordinator.address, "oslo", coordinator.store.layout)
    oslo.join()
    while coordinator.state.round < until_round or oslo.round < until_round:
        oslo.follow()
    oslo.session.leave("enough")
    oslo.close()


def watch_feedback(monkeypatch: pytest.MonkeyPatch) -> dict[int, npt.NDArray[np.float32]]:
    """EF of the real worker as it begins to encode, by round; filled while workers live."""
    found: dict[int, npt.NDArray[np.float32]] = {}
    encode = Exchange.encode

    def look(exchange: Exchange, k: int, **options: Any) -> Staged:
        found[exchange.round] = exchange._ef.copy()
        return encode(exchange, k, **options)

    monkeypatch.setattr(Exchange, "encode", look)
    return found
