"""A power cut tears the journal's last write: the run falls back to the event before, and goes on.

Compared with: the state after each prefix of the events. The files are copied while a coordinator
has them, as a power cut leaves them. Run alone: pytest tests/coordinator/test_torn_journal.py
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.live import Coordinator, Member, coordinating, eventually
from support.runs import LAYOUT, config_of, create_store, vector

from coordinator.machine import step
from coordinator.recovery import recover
from coordinator.state import State, initial_state
from coordinator.store import Store, rules_of

CONFIG = config_of(
    quorum={"min_sites": 2},
    run={"rounds": 9},
    state={"snapshot_every_rounds": 5, "keep_updates": 5},
    codec={"k": 8},
)


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    """Files of a run of one round, with one contribution to the second, as on a dead machine."""
    with (
        coordinating(create_store(tmp_path / "live", CONFIG)) as coordinator,
        Member(coordinator, "paris") as paris,
        Member(coordinator, "oslo") as oslo,
    ):
        paris.enter()
        oslo.enter()
        paris.contribute(0, vector(LAYOUT, 1, scale=1e-2))
        oslo.contribute(0, vector(LAYOUT, 2, scale=1e-2))
        eventually(lambda: (coordinator.state.round, coordinator.state.phase) == (1, "open"), "1")
        paris.contribute(1, vector(LAYOUT, 3, scale=1e-2))
        return Path(shutil.copytree(tmp_path / "live", tmp_path / "cut"))


def lasting(state: State) -> dict[str, object]:
    sites = {name: {**vars(site), "heard_at": 0.0} for name, site in state.sites.items()}
    return {**vars(state), "deadline_at": 0.0, "quorum_at": None, "sites": sites}


def prefixes(directory: Path, theta_digest: str) -> list[dict[str, object]]:
    """The state after none, one, two ... of the events."""
    store = Store.open(directory)
    events = [event for _, event in store.journal.replay(after=0)]
    store.close()
    states = [initial_state(rules_of(CONFIG), theta_digest)]
    for event in events:
        states.append(step(states[-1], event, 0.0)[0])
    return [lasting(state) for state in states]


def test_whatever_is_torn_off_the_journal_the_events_before_count(
    cut: Path, tmp_path: Path
) -> None:
    log = "journal.sqlite-wal"
    size = (cut / log).stat().st_size
    assert size > 0, "a coordinator that stops writes it back; this one was cut off"
    whole = Path(shutil.copytree(cut, tmp_path / "whole"))
    store = Store.open(whole)
    digest = recover(store)[0].digests[0]
    store.close()
    states, seen = prefixes(whole, digest), set()
    for torn_bytes in (0, 1, 100, 5000, 15_000, 40_000):
        directory = Path(shutil.copytree(cut, tmp_path / f"torn-{torn_bytes}"))
        data = (directory / log).read_bytes()
        (directory / log).write_bytes(data[: len(data) - torn_bytes])
        store = Store.open(directory)
        state, reducer = recover(store)
        store.close()
        assert lasting(state) in states
        assert reducer.theta_digest == state.theta_digest
        seen.add(states.index(lasting(state)))
    assert max(seen) == len(states) - 1, "with nothing torn off nothing is missing"
    assert len(seen) > 3


def test_a_run_goes_on_from_a_torn_journal(cut: Path) -> None:
    """Its last event, an acknowledged shard, is gone; the site that is asked again sends it."""
    log = cut / "journal.sqlite-wal"
    log.write_bytes(log.read_bytes()[:-100])
    coordinator = Coordinator(Store.open(cut))
    try:
        assert coordinator.state.complete == ()
        with Member(coordinator, "paris") as paris, Member(coordinator, "oslo") as oslo:
            for member in (paris, oslo):
                member.caller.incarnation = 1
                member.contribute(1, vector(LAYOUT, 3, scale=1e-2))
            eventually(lambda: coordinator.state.round == 2, "the round is committed")
    finally:
        coordinator.stop()
