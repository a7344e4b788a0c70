"""How the members that are there agree on one state and one order: a pure decision.

Every change of a member's state (an inner step, an outer update, another group) is staged by all,
voted, and committed by each alone; `version` counts the commits. A vote can reach some and not
others, so when members meet, some may have committed a change that others only staged. As a vote
is only taken when all had staged, those others commit it now: nothing that anyone committed is
lost, and nobody has to be healed but those who were not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loco.inner.moving import Change


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A state of the site, and which part of it a member holds alone."""

    version: int
    """Changes committed since the site began."""
    label: str
    """Name of the group that committed the last one: versions of two groups are not comparable."""
    rank: int
    """The member's rank in that group."""
    size: int
    """Ranks of that group."""
    backup_of: int
    """Rank of that group whose shards the member holds too; -1: none."""


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What a member says when it comes to a meeting."""

    id: str
    store: str
    """HOST:PORT of its TCPStore, where a group that it is first of can form."""
    now: Standing | None
    """Where it stands; None: it has no state."""
    staged: Standing | None
    """Where it would stand after the change that it has staged."""
    waiting_seconds: float
    """How long it has waited for a site, at a lighthouse that has not died meanwhile."""
    prepared: bool
    """It has what can be fetched while the others train."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a meeting decided."""

    name: str
    """Of the group, random: no number of a quorum names anything of ours."""
    store: str
    """HOST:PORT of the TCPStore of the first in `order`."""
    order: tuple[str, ...]
    """Ids in the order of the new ranks: who was there before keeps its place before who is new."""
    finish: tuple[str, ...]
    """Members that commit what they staged."""
    heal: dict[str, str]
    """Members that take the state of another now, and whose."""
    later: dict[str, str]
    """Those that fetch the most of it first, while `order` goes on without them, and from whom."""
    change: Change
    """Who brings which old rank's shards."""
    begins: bool
    """Nobody has a state: the site starts from its checkpoint or the coordinator's snapshot."""


def decide(hellos: Sequence[Hello], name: str) -> Plan:
    """The plan for these members; the same whatever order they came in."""
    hellos = sorted(hellos, key=lambda h: h.id)
    stores = {h.id: h.store for h in hellos}
    states = {(h.now.version, h.now.label) for h in hellos if h.now is not None}
    if not states:
        return Plan(
            name=name,
            store=hellos[0].store,
            order=tuple(h.id for h in hellos),
            finish=(),
            heal={},
            later={},
            change=Change(old_size=1, holders=(None,)),
            begins=True,
        )
    # The state that most can go on from; of two equally held ones the one that is further.
    best = max(states, key=lambda state: (len(_able(hellos, *state)), *state))
    able = _able(hellos, *best)
    order = sorted(able, key=lambda id_: (able[id_].rank, id_))
    new = [h.id for h in hellos if h.id not in able and h.prepared]
    later = [h.id for h in hellos if h.id not in able and not h.prepared]
    return Plan(
        name=name,
        store=stores[order[0]],
        order=(*order, *new),
        finish=tuple(h.id for h in hellos if h.id in able and h.now != able[h.id]),
        heal={id_: order[index % len(order)] for index, id_ in enumerate(new)},
        later={id_: order[index % len(order)] for index, id_ in enumerate(later)},
        change=_change([able[id_] for id_ in order]),
        begins=False,
    )


def _able(hellos: Sequence[Hello], version: int, label: str) -> dict[str, Standing]:
    """Those who are at a state, or have staged it, and how they stand there."""
    return {
        h.id: standing
        for h in hellos
        for standing in (h.now, h.staged)
        if standing is not None and (standing.version, standing.label) == (version, label)
    }


def _change(able: Sequence[Standing]) -> Change:
    """Whose shards are there, by the rank in the group of the last commit."""
    own = {standing.rank: rank for rank, standing in enumerate(able)}
    copies = {standing.backup_of: rank for rank, standing in enumerate(able)}
    holders = tuple(own.get(old, copies.get(old)) for old in range(able[0].size))
    return Change(old_size=able[0].size, holders=holders)
