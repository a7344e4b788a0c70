"""What the round machine knows: plain frozen data, made anew at each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from coordinator.events import Hold

SiteStatus = Literal["syncing", "ready", "lost", "left", "evicted", "quarantined"]
Phase = Literal["gathering", "open", "closing", "finished"]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The part of the config that the machine obeys; times in seconds."""

    rounds: int
    min_sites: int
    grace_seconds: float
    deadline_seconds: float
    dead_after_seconds: float
    inner_steps: int
    """H, unless an operator changes it."""
    quarantine_after: int
    """Refusals in a row after which a site is quarantined."""
    keep_updates: int
    """Committed updates that a site which was away may still catch up with."""


@dataclass(frozen=True, kw_only=True)
class Strike:
    """A refused contribution, and which of its shards were: together they count once."""

    round: int
    data_cursor: int
    shards: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Site:
    """A site as the coordinator knows it."""

    incarnation: int
    instance: str
    num_shards: int
    status: SiteStatus
    heard_at: float
    rounds_included: int = 0
    tokens_included: int = 0
    data_cursor: int = 0
    """Inner steps behind its included contributions: where its data goes on."""
    refusals: int = 0
    """Contributions refused in a row."""
    struck: Strike | None = None
    """The last of them, until a whole contribution is accepted."""

    @property
    def alive(self) -> bool:
        return self.status in ("syncing", "ready")


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """What has come from one site for the current round."""

    incarnation: int
    num_shards: int
    tokens: int
    inner_steps: int
    data_cursor: int
    digests: Mapping[int, str]  # shard -> digest of its bytes
    size_bytes: int = 0
    norm_sq: float = 0.0

    @property
    def complete(self) -> bool:
        return len(self.digests) == self.num_shards


@dataclass(frozen=True, kw_only=True)
class Update:
    """A committed update: what turns theta of its round into theta of the next."""

    size_bytes: int
    digest: str
    theta_digest: str  # of theta after it
    included: Mapping[str, Contribution]
    settings: Mapping[str, float]
    """Those of its round, and the run's inner steps before it: how its contributions were made."""
    first_step: int
    num_sites: int = 1
    """Sites that shared `codec.k` in its round."""


@dataclass(frozen=True, kw_only=True)
class State:
    """Everything that the machine knows."""

    rules: Rules
    digests: Mapping[int, str]  # round -> digest of theta at that round, hex
    round: int = 0
    phase: Phase = "gathering"
    sites: Mapping[str, Site] = field(default_factory=dict)
    expected: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    """Sites that the open round expected and that fell silent: expected again if heard of."""
    contributions: Mapping[str, Contribution] = field(default_factory=dict)
    included: tuple[str, ...] = ()
    updates: Mapping[int, Update] = field(default_factory=dict)
    deadline_at: float = 0.0
    quorum_at: float | None = None
    settings: Mapping[str, float] = field(default_factory=dict)
    """What operators have changed, as it holds for the current round."""
    next_settings: Mapping[str, float] = field(default_factory=dict)
    """The same for the round that opens next."""
    hold: Hold = "none"
    first_step: int = 0
    """Inner steps of the run before the current round."""
    num_sites: int = 1
    """Sites that share `codec.k` in the current round: as many as the last update included, in
    round 0 those that it opened for. So it depends on what the run did, and not on who is just
    starting again when the round opens."""
    snapshot_due: bool = False

    @property
    def inner_steps(self) -> int:
        """H of the current round."""
        return int(self.settings.get("inner.steps", self.rules.inner_steps))

    @property
    def theta_digest(self) -> str:
        """Digest of theta at the current round."""
        return self.digests[self.round]

    @property
    def complete(self) -> tuple[str, ...]:
        """Sites whose contribution to the current round is whole, sorted by name."""
        return tuple(sorted(s for s, c in self.contributions.items() if c.complete))

    @property
    def ready(self) -> tuple[str, ...]:
        """Sites that hold theta of the current round or are on their way from the last."""
        return tuple(sorted(s for s, site in self.sites.items() if site.status == "ready"))

    def with_site(self, name: str, site: Site) -> State:
        return replace(self, sites={**self.sites, name: site})


def initial_state(rules: Rules, theta_digest: str) -> State:
    """The state of a new run: no site, round 0."""
    phase: Phase = "gathering" if rules.rounds else "finished"
    return State(rules=rules, digests={0: theta_digest}, phase=phase)
