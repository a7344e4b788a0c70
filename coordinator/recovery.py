"""From a state directory to the state of the run and its theta: replay is recovery."""

from __future__ import annotations

from coordinator.events import RoundCommitted
from coordinator.machine import step
from coordinator.reducer import Reducer
from coordinator.state import State
from coordinator.store import Store
from loco.errors import LocoError


def recover(store: Store) -> tuple[State, Reducer]:
    """Go from the newest sound snapshot through the journal, reducing its rounds again.

    Each round must give the digest that the journal holds; else LocoError names it.
    """
    snapshot = store.snapshots.newest_sound()
    state = snapshot.state
    reducer = Reducer(store, snapshot)
    for _, event in store.journal.replay(after=snapshot.manifest.journal_seq):
        if isinstance(event, RoundCommitted):
            _reduce_again(store, state, reducer, event)
        state, _ = step(state, event, 0.0)
    return state, reducer


def _reduce_again(store: Store, state: State, reducer: Reducer, event: RoundCommitted) -> None:
    try:
        made = reducer.reduce(state)
    except FileNotFoundError as error:
        raise LocoError(
            f"replay of round {event.round} needs {error.filename}, which is gone"
        ) from error
    if made.theta_digest != event.theta_digest:
        raise LocoError(
            f"replay of round {event.round} gives theta {made.theta_digest[:16]}, the journal "
            f"says {event.theta_digest[:16]}: a file in {store.directory} has changed"
        )
