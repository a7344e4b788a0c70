"""Short runs that loops of users' own join."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from chaos.runs import exact_run
from support.live import Coordinator, coordinating

from coordinator.events import RoundCommitted, ShardStored
from coordinator.store import Store
from loco.config import Config
from loco.model.initial import initial_parameters

H, ROUNDS = 2, 5


@contextlib.contextmanager
def run_of(config: Config, directory: Path) -> Iterator[Coordinator]:
    torch.set_num_threads(1)
    layout, theta = initial_parameters(config)
    with coordinating(
        Store.create(directory, run_id="join", config=config, layout=layout, theta=theta)
    ) as coordinator:
        yield coordinator


def raw_run(**sections: dict[str, Any]) -> dict[str, Any]:
    raw: dict[str, Any] = exact_run(seed=3, rounds=ROUNDS)
    raw["outer"] = {}  # whatever the chaos harness varies by seed
    raw["inner"] |= {"steps": H, "max_local_steps": H}
    raw["quorum"]["min_sites"] = 1
    for name, section in sections.items():
        raw[name] = raw.get(name, {}) | section
    return raw


def digests(coordinator: Coordinator) -> list[str]:
    events = (event for _, event in coordinator.store.journal.replay(after=0))
    return [e.theta_digest for e in events if isinstance(e, RoundCommitted)]


def tokens(coordinator: Coordinator) -> list[int]:
    events = (event for _, event in coordinator.store.journal.replay(after=0))
    return [e.tokens for e in events if isinstance(e, ShardStored)]
