"""What can happen to a run, and what the round machine asks for in return.

Durable events are journaled before the state they make is visible; replaying them in order gives
the same state. Volatile events only move clocks. Times are seconds on the coordinator's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

Hold = Literal["none", "paused", "draining"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events."""

    durable: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class SiteJoined(Event):
    """A process life of a site entered the run."""

    site: str
    instance: str
    num_shards: int
    """Shards of its contributions: its ranks, or a multiple of them (worker/lanes.py)."""


@dataclass(frozen=True, kw_only=True)
class SiteReady(Event):
    """The site holds theta of the current round, digest checked."""

    site: str
    incarnation: int


@dataclass(frozen=True, kw_only=True)
class SiteLeft(Event):
    """The site said goodbye."""

    site: str
    incarnation: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class SiteLost(Event):
    """Nothing was heard of the site for `dead_after_seconds`."""

    site: str
    incarnation: int


@dataclass(frozen=True, kw_only=True)
class SiteReturned(Event):
    """A site that was given up for lost is heard of again, in the same process life."""

    site: str
    incarnation: int


@dataclass(frozen=True, kw_only=True)
class SiteEvicted(Event):
    """An operator threw the site out; it may not join until it is readmitted."""

    site: str


@dataclass(frozen=True, kw_only=True)
class SiteQuarantined(Event):
    """Too many contributions of the site were refused in a row."""

    site: str


@dataclass(frozen=True, kw_only=True)
class SiteReadmitted(Event):
    """An operator lets an evicted or quarantined site join again."""

    site: str


@dataclass(frozen=True, kw_only=True)
class ShardRefused(Event):
    """A shard was malformed, corrupt or absurd.

    `round` and `data_cursor` tell which contribution of the site it belongs to.
    """

    site: str
    incarnation: int
    round: int
    shard: int
    data_cursor: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class SettingChanged(Event):
    """An operator changed a setting; it holds from the next round on."""

    key: str
    value: float


@dataclass(frozen=True, kw_only=True)
class HoldChanged(Event):
    """An operator pauses, drains or resumes the run: what happens at the next round boundary."""

    hold: Hold


@dataclass(frozen=True, kw_only=True)
class SnapshotRequested(Event):
    """An operator wants a snapshot, at the end of the open round if one is open."""


@dataclass(frozen=True, kw_only=True)
class ShardStored(Event):
    """One shard of a contribution lies on disk, checked.

    `norm_sq` is the sum of squares of its values, `data_cursor` the site's position in its data.
    """

    site: str
    incarnation: int
    round: int
    fragment: int
    shard: int
    num_shards: int
    size_bytes: int
    digest: str
    tokens: int
    inner_steps: int
    data_cursor: int
    norm_sq: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RoundOpened(Event):
    """Contributions for the round are welcome; it waits for the expected sites."""

    round: int
    expected: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RoundClosed(Event):
    """No further contribution counts; the reducer may start."""

    round: int
    included: tuple[str, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RoundLate(Event):
    """The round's deadline has passed without quorum; it is set anew."""

    durable: ClassVar[bool] = False
    round: int


@dataclass(frozen=True, kw_only=True)
class RoundCommitted(Event):
    """The update is durable and theta has moved on."""

    round: int
    update_bytes: int
    update_digest: str
    theta_digest: str


@dataclass(frozen=True, kw_only=True)
class Heard(Event):
    """Any sign of life of a site."""

    durable: ClassVar[bool] = False
    site: str
    incarnation: int


@dataclass(frozen=True, kw_only=True)
class Tick(Event):
    """Time has passed."""

    durable: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class Recovered(Event):
    """The journal was replayed on a new clock: every wait starts again."""

    durable: ClassVar[bool] = False


DURABLE: dict[str, type[Event]] = {
    cls.__name__: cls
    for cls in (
        SiteJoined,
        SiteReady,
        SiteLeft,
        SiteLost,
        SiteReturned,
        SiteEvicted,
        SiteQuarantined,
        SiteReadmitted,
        SettingChanged,
        HoldChanged,
        SnapshotRequested,
        ShardRefused,
        ShardStored,
        RoundOpened,
        RoundClosed,
        RoundCommitted,
    )
}


@dataclass(frozen=True, kw_only=True)
class Refuse:
    """The event is not admissible; the state is unchanged. `reason` is the wire enum's name."""

    reason: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Duplicate:
    """The event repeats one that was accepted; the state is unchanged."""


@dataclass(frozen=True, kw_only=True)
class Emit:
    """The machine has decided: journal this event and step it."""

    event: Event


@dataclass(frozen=True, kw_only=True)
class Reduce:
    """Aggregate the contributions of these sites and make the update."""

    round: int
    included: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Say:
    """Something an operator wants to read in the log."""

    message: str


Effect = Refuse | Duplicate | Emit | Reduce | Say
