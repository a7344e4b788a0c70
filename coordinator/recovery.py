"""From a state directory to the state of the run and its theta: replay is recovery."""

from __future__ import annotations

from coordinator.events import RoundCommitted
from coordinator.machine import step
from coordinator.reducer import Reducer
from coordinator.state import Rules, State, initial_state
from coordinator.store import Store
from loco.config import Config
from loco.errors import LocoError


def recover(store: Store) -> tuple[State, Reducer]:
    """Replay the journal, and bring theta from the newest snapshot to the journal's round.

    The rounds since the snapshot are reduced again from the contributions on disk; each gives the
    digest that the journal holds, or LocoError names the round.
    """
    state = initial_state(_rules(store.config), store.initial_digest)
    snapshot_round = store.snapshot_round()
    reducer = Reducer(store)
    _check_theta(
        store,
        f"the snapshot of round {snapshot_round}",
        reducer.theta_digest,
        store.snapshot_digest(snapshot_round),
    )
    for _, event in store.journal.replay():
        if isinstance(event, RoundCommitted) and event.round >= snapshot_round:
            _reduce_again(store, state, reducer, event)
        state, _ = step(state, event, 0.0)
    return state, reducer


def _reduce_again(store: Store, state: State, reducer: Reducer, event: RoundCommitted) -> None:
    made = reducer.reduce(event.round, {name: state.contributions[name] for name in state.included})
    _check_theta(store, f"replay of round {event.round}", made.theta_digest, event.theta_digest)


def _check_theta(store: Store, source: str, found: str, recorded: str) -> None:
    if found != recorded:
        raise LocoError(
            f"{source} gives theta {found[:16]}, recorded was {recorded[:16]}: a file in "
            f"{store.directory} has changed"
        )


def _rules(config: Config) -> Rules:
    return Rules(
        rounds=config.run.rounds,
        min_sites=config.quorum.min_sites,
        grace_seconds=config.quorum.grace_seconds,
        deadline_seconds=config.quorum.deadline_seconds,
        dead_after_seconds=config.quorum.dead_after_seconds,
        keep_updates=config.state.keep_updates,
    )
