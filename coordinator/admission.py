"""What members may do, as pure questions to the state: admitted or refused, and what comes next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from coordinator.events import Duplicate, Refuse, ShardStored, SiteJoined, SiteReady
from coordinator.state import Contribution, Site, State

Directive = Literal["wait", "train", "update", "resync", "finished"]


def check_member(state: State, site: str, incarnation: int) -> Refuse | None:
    """Refuse a caller that is not the current incarnation of a member."""
    known = state.sites.get(site)
    banned = _check_ban(site, known)
    if banned is not None:
        return banned
    if known is None or known.status == "left" or incarnation > known.incarnation:
        return Refuse(
            reason="unknown_site",
            message=f"site {site!r} (incarnation {incarnation}) is not a member of this run: "
            "it left or never joined; join again",
        )
    if incarnation < known.incarnation:
        return Refuse(
            reason="superseded",
            message=f"site {site!r} was joined again by another process (incarnation "
            f"{known.incarnation}); this one (incarnation {incarnation}) must stop: "
            "start one worker a site",
        )
    return None


def check_join(state: State, event: SiteJoined) -> Refuse | Duplicate | None:
    """A repeated Join of one process life changes nothing; banned sites stay out."""
    known = state.sites.get(event.site)
    banned = _check_ban(event.site, known)
    if banned is not None or known is None or known.status == "left":
        return banned
    return Duplicate() if known.instance == event.instance else None


def _check_ban(name: str, site: Site | None) -> Refuse | None:
    if site is None or site.status not in ("evicted", "quarantined"):
        return None
    why = {
        "evicted": "an operator evicted it",
        "quarantined": f"{site.refusals} of its contributions were refused in a row",
    }
    return Refuse(
        reason=site.status,
        message=f"site {name!r} is {site.status}: {why[site.status]}; "
        f"an operator readmits it with: loco control HOST:PORT readmit {name}",
    )


def check_push(state: State, event: ShardStored) -> Refuse | Duplicate | None:
    """The answer to a shard, before its bytes are read and again before it is accepted."""
    stranger = check_member(state, event.site, event.incarnation)
    if stranger is not None:
        return stranger
    have = _contributions(state, event.round).get(event.site)
    if have is not None and not made_anew(event, have):
        known = have.digests.get(event.shard)
        if known == event.digest:
            return Duplicate()
        if known is not None:
            return Refuse(
                reason="conflict",
                message=f"shard {event.shard} of {event.site!r} for round {event.round} was "
                "accepted before with other bytes",
            )
    return _check_round(state, event) or _check_shard(state, event, have)


def made_anew(event: ShardStored, have: Contribution) -> bool:
    """Whether the shard begins another contribution than the one of which `have` has come.

    Another process life makes one, and so does a site of which the round asks one again after it
    refused the first: its data went on meanwhile.
    """
    if event.incarnation != have.incarnation:
        return True
    return not have.complete and event.data_cursor > have.data_cursor


def _contributions(state: State, round_: int) -> Mapping[str, Contribution]:
    if round_ == state.round:
        return state.contributions
    return state.updates[round_].included if round_ in state.updates else {}


def _check_round(state: State, event: ShardStored) -> Refuse | None:
    if event.round < state.round or (event.round == state.round and state.phase == "closing"):
        return Refuse(
            reason="stale_round",
            message=f"round {event.round} is closed (the run is at round {state.round}); "
            "the site keeps its error feedback and goes on with the next round",
        )
    if event.round > state.round or state.phase != "open":
        return Refuse(
            reason="not_expected",
            message=f"round {event.round} is not open: the run is at round {state.round}, "
            f"{state.phase}",
        )
    return None


def _check_shard(state: State, event: ShardStored, have: Contribution | None) -> Refuse | None:
    num_shards = state.sites[event.site].num_shards
    if event.num_shards != num_shards or not 0 <= event.shard < num_shards or event.fragment != 0:
        return Refuse(
            reason="shard",
            message=f"shard {event.shard} of {event.num_shards}, fragment {event.fragment}: site "
            f"{event.site!r} joined with {num_shards} shards, so they are 0 to {num_shards - 1} of "
            f"{num_shards}, fragment 0",
        )
    if event.tokens < 1:
        return Refuse(
            reason="shard",
            message=f"shard {event.shard} of {event.site!r} states {event.tokens} tokens: they are "
            "the contribution's weight, at least 1",
        )
    if have is None:
        return None
    if made_anew(event, have):
        if not have.complete:
            return None
        return Refuse(
            reason="not_expected",
            message=f"incarnation {have.incarnation} of {event.site!r} already contributed to "
            f"round {event.round}",
        )
    if (have.tokens, have.inner_steps, have.data_cursor) != (
        event.tokens,
        event.inner_steps,
        event.data_cursor,
    ):
        return Refuse(
            reason="shard",
            message=f"shard {event.shard} of {event.site!r} states {event.tokens} tokens and "
            f"{event.inner_steps} inner steps, other shards of the contribution {have.tokens} "
            f"and {have.inner_steps}",
        )
    return None


def directive(
    state: State, site: str, have_round: int, theta_digest: str, *, contributing: bool = False
) -> tuple[Directive, str] | Refuse:
    """What a member that holds theta of `have_round` may do next, and why, in words.

    `contributing`: what it does for that round is on its way, though not here.
    """
    if have_round > state.round:
        return Refuse(
            reason="ahead",
            message=f"site {site!r} holds round {have_round}, this coordinator is at round "
            f"{state.round}: it lost its state or is the wrong one; restore its state directory",
        )
    if theta_digest != state.digests.get(have_round):
        return "resync", f"theta of {site!r} at round {have_round} is not the run's, or too old"
    if have_round < state.round:
        return "update", f"round {have_round} is committed"
    if state.phase == "finished":
        return "finished", f"all {state.rules.rounds} rounds are done"
    if state.phase == "gathering" and state.hold == "draining":
        return "finished", f"an operator has drained the run at round {state.round}"
    if _is_awaited(state, site) and not contributing:
        return "train", f"round {state.round} is open"
    return "wait", waiting_for(state)


def may_go_on(state: State, site: str, have_round: int) -> bool:
    """Whether a member with theta of `have_round` may train once it has applied that update."""
    return have_round + 1 == state.round and _is_awaited(state, site)


def _is_awaited(state: State, site: str) -> bool:
    return state.phase == "open" and site in state.expected and site not in state.complete


def caught_up(state: State, site: str, have_round: int, theta_digest: str) -> SiteReady | None:
    """The event that a waiting member is ready now, if it was not before."""
    member = state.sites[site]
    if member.status == "ready" or have_round != state.round or theta_digest != state.theta_digest:
        return None
    return SiteReady(site=site, incarnation=member.incarnation)


def waiting_for(state: State) -> str:
    """For what the run waits, in words."""
    if state.phase == "gathering" and state.hold != "none":
        return f"the run is {state.hold.replace('draining', 'drained')} at round {state.round}"
    if state.phase == "gathering":
        ready, needed = len(state.ready), state.rules.min_sites if state.round == 0 else 1
        return f"round {state.round} opens when {needed} sites are ready; {ready} are"
    if state.phase == "open":
        late = [s for s in state.expected if s not in state.complete]
        short = state.rules.min_sites - len(state.complete)
        if late:
            return f"round {state.round} waits for the contribution of {', '.join(late)}"
        return f"round {state.round} needs {short} more contributions than there are sites"
    if state.phase == "closing":
        return f"the update of round {state.round} is being made"
    return "the run is finished"
