"""What operators may change while the run goes on, and which value holds in a round.

The config (with its schedules) says it, until an operator has: then that value holds for good.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from coordinator.state import State, Update
from loco.config import Config
from loco.outer import alpha_at, k_at, k_of_site, own_step, rules_at

_CONFIGURED: dict[str, Callable[[Config, int], float]] = {
    "outer.alpha": lambda config, round_: alpha_at(config.outer, round_),
    "codec.k": lambda config, round_: k_at(config.codec, round_, config.run.rounds),
    "inner.steps": lambda config, _round: config.inner.steps,
}


def in_force(key: str, config: Config, ordered: Mapping[str, float], round_: int) -> float:
    """The value of a round whose operators have ordered `ordered`."""
    return ordered.get(key, _CONFIGURED[key](config, round_))


def k_of_round(config: Config, made: State | Update, round_: int) -> int:
    """Values of a chunk that each site sends: of the fragment, shared where there are many."""
    own = rules_at(config.outer, config.codec, round_).k
    k = own or int(in_force("codec.k", config, made.settings, round_))
    return k_of_site(k, config.codec.k_sites, made.num_sites)


def own_step_of_round(config: Config, made: State | Update, round_: int) -> float:
    """What a site may expect the update to make of its own values."""
    rules = rules_at(config.outer, config.codec, round_)
    alpha = in_force("outer.alpha", config, made.settings, round_)
    return own_step(rules, alpha, config.outer.momentum, made.num_sites)


def settings_document(config: Config, state: State) -> dict[str, dict[str, Any]]:
    """By key: what holds in the current round, what the config says, what operators have ordered.

    `pending` is the order that waits for the next round to open, `pending_round` that round's
    number; both null where nothing waits.
    """
    next_round = state.round + (state.phase != "gathering")
    document: dict[str, dict[str, Any]] = {}
    for key, configured in _CONFIGURED.items():
        ordered, then = state.settings.get(key), state.next_settings.get(key)
        waits = then != ordered
        document[key] = {
            "value": in_force(key, config, state.settings, state.round),
            "configured": configured(config, state.round),
            "ordered": ordered,
            "pending": then if waits else None,
            "pending_round": next_round if waits else None,
        }
    return document
