"""The names of all kinds of faults, and which of them a run gets.

A name here is what the command line takes, what is said while a fault is made, and a key of the
JSON object.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from coordinator.failpoints import NAMES

from . import faults, rank_faults
from .faults import Fault

_ANYWHERE: dict[str, Fault] = {
    "kill coordinator": faults.kill_coordinator,
    "kill coordinator twice": faults.kill_coordinator_twice,
    "restart coordinator": faults.restart_coordinator,
    "freeze coordinator": faults.freeze_coordinator,
    "second coordinator": faults.second_coordinator,
    "jump wall clock": faults.jump_wall_clock,
    "jump monotonic clock": faults.jump_monotonic_clock,
    "disk full": faults.disk_full,
    "freeze site": faults.freeze_site,
    "freeze rank": faults.freeze_rank,
    "partition": faults.partition,
    "black hole": faults.black_hole,
    "slow link": faults.slow_link,
    "cut upload": faults.cut_upload,
    "cut download": faults.cut_download,
    "repeat push": faults.repeat_push,
    "late push": faults.late_push,
    **{f"kill at {name}": faults.kill_at(name) for name in NAMES},
}
_EXACT: dict[str, Fault] = {
    "older state": faults.older_state,
    "empty state": faults.empty_state,
}
"""Only where all sites are in every round: one left behind would follow the older state."""
_BULK: dict[str, Fault] = {"flip bits": faults.flip_bits}
"""Only where payloads are many times larger than the messages around them."""
_STARTS: dict[str, Fault] = {"kill site": faults.kill_site, "kill rank": faults.kill_rank}
"""Rarely: a site that starts imports torch."""
_TORCHFT: dict[str, Fault] = {
    "torchft: rank dies": rank_faults.rank_dies,
    "torchft: two ranks die": rank_faults.two_ranks_die,
    "torchft: rank sleeps": rank_faults.rank_sleeps,
    "torchft: lighthouse restarts": rank_faults.lighthouse_restarts,
    "torchft: leader dies in a push": rank_faults.leader_dies_in_a_push,
    "torchft: members 1-2-3-2-3": rank_faults.members_1_2_3_2_3,
}
"""Only where a site runs under torchft; each starts ranks again."""

KINDS = _ANYWHERE | _EXACT | _BULK | _STARTS | _TORCHFT


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one of the runs gets."""

    often: tuple[str, ...]
    """Every one of these kinds about equally often."""
    rarely: tuple[str, ...]
    """One fault in `EVERY` is of these."""
    part: int
    """Its part of the faults, of the sum of the parts of all runs that are made."""


EVERY = 12
SHARES = {
    "exact": Share(often=(*_ANYWHERE, *_EXACT), rarely=tuple(_STARTS), part=12),
    "quorum": Share(often=(*_ANYWHERE, *_BULK), rarely=tuple(_STARTS), part=6),
    "torchft": Share(often=tuple(_TORCHFT), rarely=(), part=2),
}


def plan(count: int, rng: random.Random, run: str) -> list[str]:
    """Names of `count` faults for a run, shuffled."""
    share = SHARES[run]
    rare = max(1, count // EVERY) if share.rarely else 0
    chosen = _cycle(share.often, count - rare, rng) + _cycle(share.rarely, rare, rng)
    rng.shuffle(chosen)
    return chosen


def split(count: int, runs: list[str]) -> dict[str, int]:
    """How many of `count` faults each run gets; the first one takes what is left over."""
    whole = sum(SHARES[run].part for run in runs)
    counts = {run: count * SHARES[run].part // whole for run in runs}
    counts[runs[0]] += count - sum(counts.values())
    return counts


def _cycle(names: tuple[str, ...], count: int, rng: random.Random) -> list[str]:
    chosen: list[str] = []
    while len(chosen) < count:
        chosen += rng.sample(names, len(names))
    return chosen[:count]
