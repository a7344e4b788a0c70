"""What a disturbed run has to answer for, computed from its journal and its sites' logs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from coordinator.events import Event, RoundClosed, RoundCommitted, ShardStored

DIGEST_CHARS = 16  # of a digest in a log line

_FATE = re.compile(
    r"round (\d+): contribution (included|not included, kept in error feedback|none); "
    r"theta is now ([0-9a-f]+)"
)
_RESUMED = re.compile(r"going on from the checkpoint of round (\d+), as incarnation (\d+)")


@dataclass(frozen=True, kw_only=True)
class Settled:
    """A site's line about a round that it has applied."""

    round: int
    kept: bool
    """Its contribution was not included and stays in its error feedback."""
    theta: str


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """A site's line about a checkpoint that it goes on from."""

    incarnation: int
    """Of the life that goes on."""
    round: int


@dataclass
class Told:
    """What a site has logged, in order."""

    settled: list[Settled] = field(default_factory=list)
    resumed: list[Resumed] = field(default_factory=list)


def read_log(messages: Iterable[str]) -> Told:
    """Pick out the lines that count."""
    told = Told()
    for message in messages:
        if found := _FATE.match(message):
            kept = found[2].startswith("not included")
            told.settled.append(Settled(round=int(found[1]), kept=kept, theta=found[3]))
        elif found := _RESUMED.match(message):
            told.resumed.append(Resumed(incarnation=int(found[2]), round=int(found[1])))
    return told


def digests_of(events: Iterable[Event]) -> dict[int, str]:
    """Digest of theta after each committed round."""
    return {e.round: e.theta_digest for e in events if isinstance(e, RoundCommitted)}


@dataclass(frozen=True, kw_only=True)
class Account:
    """Where the contributions of a run have gone."""

    rounds: int
    accepted: int
    """Contributions, whole or in part, of which a shard was acknowledged."""
    included: int
    kept: int
    """Not included, and back in their site's error feedback or made again from its checkpoint."""
    lost: list[tuple[str, int]]
    """(site, round) of those of which neither is true."""


def account(events: Sequence[Event], told: dict[str, Told]) -> Account:
    """Follow every acknowledged shard of a closed round to where its values are."""
    digests = digests_of(events)
    closed = {e.round: e.included for e in events if isinstance(e, RoundClosed)}
    lives: dict[tuple[str, int], set[int]] = defaultdict(set)
    for event in events:
        if isinstance(event, ShardStored) and event.round in digests:
            lives[event.site, event.round].add(event.incarnation)
    included = {key for key in lives if key[0] in closed[key[1]]}
    kept = {
        (site, round_)
        for site, round_ in lives.keys() - included
        if _is_kept(round_, max(lives[site, round_]), told[site])
    }
    return Account(
        rounds=len(digests),
        accepted=len(lives),
        included=len(included),
        kept=len(kept),
        lost=sorted(lives.keys() - included - kept),
    )


def _is_kept(round_: int, life: int, told: Told) -> bool:
    """The site said so, or a life after the one that pushed went on from before that round."""
    said = any(line.round == round_ and line.kept for line in told.settled)
    return said or any(r.incarnation > life and r.round <= round_ for r in told.resumed)


def counted_twice(events: Iterable[Event]) -> list[str]:
    """Included contributions with inner steps that an earlier one of the same site had, too."""
    last: dict[str, ShardStored] = {}
    behind: dict[str, int] = defaultdict(int)
    found = []
    for event in events:
        if isinstance(event, ShardStored):
            last[event.site] = event
        elif isinstance(event, RoundClosed):
            for site in event.included:
                begin = last[site].data_cursor - last[site].inner_steps
                if begin < behind[site]:
                    found.append(
                        f"round {event.round} counts steps {begin}-{behind[site]} of {site} again"
                    )
                behind[site] = last[site].data_cursor
    return found


def wrong_digests(events: Sequence[Event], told: dict[str, Told]) -> tuple[int, list[str]]:
    """How many (site, round) were compared, and those whose theta was not the journal's."""
    digests = digests_of(events)
    wrong = [
        f"{site} at round {line.round}"
        for site, log in told.items()
        for line in log.settled
        if digests[line.round][:DIGEST_CHARS] != line.theta
    ]
    return sum(len(log.settled) for log in told.values()), wrong


def first_difference(one: dict[int, str], other: dict[int, str]) -> int | None:
    """The first round that both runs committed with another theta; None when there is none."""
    both = sorted(one.keys() & other.keys())
    return next((round_ for round_ in both if one[round_] != other[round_]), None)
