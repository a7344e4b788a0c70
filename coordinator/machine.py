"""The round machine: `step(state, event, now) -> (state, effects)`; no clock, no I/O, no tensors.

One round after the other: sites gather, a round opens for those that are ready, contributions
come in, it closes (all expected ones are in, or quorum and grace), the reducer makes the update,
the next one opens. Every decision is an event of its own, so that the journal alone tells what
happened. Golden transcripts: tests/golden/machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from coordinator.admission import check_join, check_member, check_push, made_anew, waiting_for
from coordinator.events import (
    Duplicate,
    Effect,
    Emit,
    Event,
    Heard,
    HoldChanged,
    Recovered,
    Reduce,
    Refuse,
    RoundClosed,
    RoundCommitted,
    RoundLate,
    RoundOpened,
    Say,
    SettingChanged,
    ShardRefused,
    ShardStored,
    SiteEvicted,
    SiteJoined,
    SiteLeft,
    SiteLost,
    SiteQuarantined,
    SiteReadmitted,
    SiteReady,
    SiteReturned,
    SnapshotRequested,
    Tick,
)
from coordinator.state import Contribution, Site, SiteStatus, State, Strike, Update

T = TypeVar("T")


def step(state: State, event: Event, now: float) -> tuple[State, tuple[Effect, ...]]:
    """Apply one event; a refused or repeated one leaves the state as it was."""
    objection = _objection(state, event)
    if objection is not None:
        return state, (objection,)
    new = _apply(state, event, now)
    return new, _decide(new, event, now)


def _objection(state: State, event: Event) -> Refuse | Duplicate | None:
    match event:
        case ShardStored():
            return check_push(state, event)
        case SiteJoined():
            return check_join(state, event)
        case SiteReady() | SiteLeft() | Heard() | SiteLost() | SiteReturned() | ShardRefused():
            return check_member(state, event.site, event.incarnation)
        case SiteEvicted() | SiteReadmitted() if event.site not in state.sites:
            known = ", ".join(sorted(state.sites)) or "none has joined"
            return Refuse(
                reason="control", message=f"there is no site {event.site!r}; sites: {known}"
            )
        case SiteReadmitted() if state.sites[event.site].status not in ("evicted", "quarantined"):
            return Refuse(
                reason="control",
                message=f"site {event.site!r} is {state.sites[event.site].status}: only one that "
                "is evicted or quarantined can be readmitted",
            )
        case _:
            return None


# --- what an event does -------------------------------------------------------------------------


def _apply(state: State, event: Event, now: float) -> State:
    match event:
        case SiteJoined():
            return _joined(state, event, now)
        case SiteReady():
            return _back(_heard(state, event.site, now), event.site, "ready")
        case SiteLeft():
            return _departed(state, event.site, "left")
        case SiteLost():
            return _lost(state, event.site)
        case SiteReturned():
            # Not of the open round: it says with its next WaitRound what it holds.
            status: SiteStatus = "ready" if event.site in state.lost else "syncing"
            return _back(state, event.site, status)
        case SiteEvicted():
            return _departed(state, event.site, "evicted")
        case SiteQuarantined():
            return _departed(state, event.site, "quarantined")
        case SiteReadmitted():
            site = replace(state.sites[event.site], status="left", refusals=0, struck=None)
            return state.with_site(event.site, site)
        case ShardRefused():
            return _struck(state, event)
        case SettingChanged():
            changed = {**state.next_settings, event.key: event.value}
            return replace(state, next_settings=changed)
        case HoldChanged():
            return replace(state, hold=event.hold)
        case SnapshotRequested():
            return replace(state, snapshot_due=state.phase in ("open", "closing"))
        case ShardStored():
            return _stored(state, event, now)
        case RoundOpened():
            return _opened(state, event, now)
        case RoundClosed():
            return replace(state, phase="closing", included=event.included)
        case RoundCommitted():
            return _committed(state, event)
        case Heard():
            return _heard(state, event.site, now)
        case Recovered():
            return _recovered(state, now)
        case RoundLate():
            return _rearmed(state, now)
        case Tick():
            return state
    raise AssertionError(f"unknown event {event!r}")


def _joined(state: State, event: SiteJoined, now: float) -> State:
    known = state.sites.get(event.site)
    life = Site(
        incarnation=1,
        instance=event.instance,
        num_shards=event.num_shards,
        status="syncing",
        heard_at=now,
    )
    site = (
        life
        if known is None
        else replace(
            known,
            incarnation=known.incarnation + 1,
            instance=life.instance,
            num_shards=life.num_shards,
            status=life.status,
            heard_at=now,
        )
    )
    return _without_partial(state, event.site).with_site(event.site, site)


def _departed(state: State, name: str, status: SiteStatus) -> State:
    return _set_status(_without_partial(state, name), name, status)


def _lost(state: State, name: str) -> State:
    """Not waited for, unless it is heard of again while the round is open."""
    lost = (*state.lost, name) if name in state.expected else state.lost
    return replace(_departed(state, name, "lost"), lost=lost)


def _back(state: State, name: str, status: SiteStatus) -> State:
    """The site is there; the open round expects it again if it did before it was lost."""
    state = _set_status(state, name, status)
    if name not in state.lost:
        return state
    return replace(
        state,
        expected=tuple(sorted({*state.expected, name})),
        lost=tuple(s for s in state.lost if s != name),
    )


def _struck(state: State, event: ShardRefused) -> State:
    """Count refused contributions, not shards: of one that all ranks sent in vain, one counts."""
    site = state.sites[event.site]
    shards: tuple[int, ...] = (event.shard,)
    last, key = site.struck, (event.round, event.data_cursor)
    counts = 1
    if last and (last.round, last.data_cursor) == key and event.shard not in last.shards:
        shards, counts = (*last.shards, *shards), 0  # the same shard again would count again
    struck = Strike(round=event.round, data_cursor=event.data_cursor, shards=shards)
    site = replace(site, refusals=site.refusals + counts, struck=struck)
    state = state.with_site(event.site, site)
    if event.reason == "corrupt" or event.round != state.round:
        return state  # the same contribution comes again
    return _without_partial(state, event.site)


def _without_partial(state: State, name: str) -> State:
    """Expect nothing more of it in this round; what it contributed in full still counts."""
    have = state.contributions.get(name)
    contributions = dict(state.contributions)
    if have is not None and not have.complete:
        del contributions[name]
    expected = tuple(s for s in state.expected if s != name or (have and have.complete))
    lost = tuple(s for s in state.lost if s != name)
    return replace(state, expected=expected, lost=lost, contributions=contributions)


def _set_status(state: State, name: str, status: SiteStatus) -> State:
    return state.with_site(name, replace(state.sites[name], status=status))


def _heard(state: State, name: str, now: float) -> State:
    return state.with_site(name, replace(state.sites[name], heard_at=now))


def _stored(state: State, event: ShardStored, now: float) -> State:
    have = state.contributions.get(event.site)
    if have is None or made_anew(event, have):
        have = Contribution(
            incarnation=event.incarnation,
            num_shards=event.num_shards,
            tokens=event.tokens,
            inner_steps=event.inner_steps,
            data_cursor=event.data_cursor,
            digests={},
        )
    have = replace(
        have,
        digests={**have.digests, event.shard: event.digest},
        size_bytes=have.size_bytes + event.size_bytes,
        norm_sq=have.norm_sq + event.norm_sq,
    )
    state = replace(state, contributions={**state.contributions, event.site: have})
    state = _back(_heard(state, event.site, now), event.site, "ready")
    if have.complete:
        site = replace(state.sites[event.site], refusals=0, struck=None)
        state = state.with_site(event.site, site)
    if state.quorum_at is None and len(state.complete) >= state.rules.min_sites:
        state = replace(state, quorum_at=now)
    return state


def _opened(state: State, event: RoundOpened, now: float) -> State:
    assert event.round == state.round
    settings = state.next_settings if state.phase == "gathering" else state.settings
    first = state.round == 0 and state.phase == "gathering"
    return replace(
        state,
        phase="open",
        settings=settings,
        num_sites=len(event.expected) if first else state.num_sites,
        expected=event.expected,
        deadline_at=now + state.rules.deadline_seconds,
    )


def _committed(state: State, event: RoundCommitted) -> State:
    assert event.round == state.round
    assert state.phase == "closing"
    update = Update(
        size_bytes=event.update_bytes,
        digest=event.update_digest,
        theta_digest=event.theta_digest,
        included={name: state.contributions[name] for name in state.included},
        settings=state.settings,
        first_step=state.first_step,
        num_sites=state.num_sites,
    )
    sites = dict(state.sites)
    for name in state.included:
        sites[name] = replace(
            sites[name],
            rounds_included=sites[name].rounds_included + 1,
            tokens_included=sites[name].tokens_included + state.contributions[name].tokens,
            data_cursor=state.contributions[name].data_cursor,
        )
    round_ = event.round + 1
    oldest = round_ - state.rules.keep_updates
    return replace(
        state,
        round=round_,
        phase="finished" if round_ >= state.rules.rounds else "gathering",
        digests={**_since(state.digests, oldest), round_: event.theta_digest},
        sites=sites,
        expected=(),
        lost=(),
        contributions={},
        included=(),
        updates={**_since(state.updates, oldest), event.round: update},
        quorum_at=None,
        first_step=state.first_step + state.inner_steps,
        num_sites=len(state.included),
        snapshot_due=False,
    )


def _since(by_round: Mapping[int, T], oldest: int) -> dict[int, T]:
    return {round_: value for round_, value in by_round.items() if round_ >= oldest}


def _rearmed(state: State, now: float) -> State:
    return replace(state, deadline_at=now + state.rules.deadline_seconds)


def _recovered(state: State, now: float) -> State:
    sites = {name: replace(site, heard_at=now) for name, site in state.sites.items()}
    quorum_at = None if state.quorum_at is None else now
    return _rearmed(replace(state, sites=sites, quorum_at=quorum_at), now)


# --- what follows from it -----------------------------------------------------------------------


def _decide(state: State, event: Event, now: float) -> tuple[Effect, ...]:
    """The next decision, if one is due: it comes back as an event, and another may follow."""
    if isinstance(event, RoundLate):
        say = Say(message=f"round {state.round} is late: {waiting_for(state)}")
        wider = _wider(state)  # a site that lives and hangs must not hold up those that came later
        return (say, Emit(event=wider)) if wider else (say,)
    if isinstance(event, RoundClosed | Recovered) and state.phase == "closing":
        return (Reduce(round=state.round, included=state.included),)
    if isinstance(event, ShardRefused) and _incorrigible(state, event.site):
        return (Emit(event=SiteQuarantined(site=event.site)),)
    if isinstance(event, Heard) and state.sites[event.site].status == "lost":
        back = SiteReturned(site=event.site, incarnation=event.incarnation)
        return (Emit(event=back),)
    due: Event | None = _opening(state) or _closing(state, now)
    if due is None and isinstance(event, Tick):
        due = _lost_site(state, now) or _late(state, now)
    return (Emit(event=due),) if due else ()


def _late(state: State, now: float) -> RoundLate | None:
    late = state.phase == "open" and state.quorum_at is None and now >= state.deadline_at
    return RoundLate(round=state.round) if late else None


def _lost_site(state: State, now: float) -> SiteLost | None:
    for name, site in state.sites.items():
        if site.alive and now - site.heard_at > state.rules.dead_after_seconds:
            return SiteLost(site=name, incarnation=site.incarnation)
    return None


def _incorrigible(state: State, site: str) -> bool:
    return state.sites[site].refusals >= state.rules.quarantine_after


def _opening(state: State) -> RoundOpened | None:
    ready = state.ready
    if state.phase == "gathering":
        if state.hold != "none":
            return None
        # Round 0 waits for min_sites; later ones open for whoever is there and close at quorum.
        enough = len(ready) >= (state.rules.min_sites if state.round == 0 else 1)
        return RoundOpened(round=state.round, expected=ready) if enough else None
    hopeful = {*state.expected, *state.complete}
    if state.phase != "open" or len(hopeful) >= state.rules.min_sites:
        return None
    return _wider(state)  # it cannot close as it stands, so nobody is disturbed


def _wider(state: State) -> RoundOpened | None:
    """The open round with everyone who is ready."""
    wider = tuple(sorted({*state.expected, *state.ready}))
    return RoundOpened(round=state.round, expected=wider) if wider != state.expected else None


def _closing(state: State, now: float) -> RoundClosed | None:
    complete = state.complete
    if state.phase != "open" or len(complete) < state.rules.min_sites:
        return None
    missing = tuple(name for name in state.expected if name not in complete)
    grace_over = state.quorum_at is not None and now - state.quorum_at >= state.rules.grace_seconds
    if missing and not grace_over:
        return None
    return RoundClosed(round=state.round, included=complete, missing=missing)
