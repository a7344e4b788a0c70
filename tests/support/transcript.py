"""Plays a script of events to the round machine and writes down everything that it answers.

A golden file is the transcript itself. Lines that begin with `>` are the script: seconds, then an
event in short; lines below it are what the machine did. Emitted events are stepped at once, as the
engine does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from coordinator.admission import caught_up, directive
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
    RoundCommitted,
    Say,
    SettingChanged,
    ShardRefused,
    ShardStored,
    SiteEvicted,
    SiteJoined,
    SiteLeft,
    SiteReadmitted,
    SnapshotRequested,
    Tick,
)
from coordinator.machine import step
from coordinator.state import Rules, State, initial_state

DEFAULTS = {
    "rounds": 3.0,
    "min_sites": 2.0,
    "grace_seconds": 10.0,
    "deadline_seconds": 60.0,
    "dead_after_seconds": 30.0,
    "inner_steps": 15.0,
    "quarantine_after": 3.0,
    "keep_updates": 2.0,
}


class Player:
    """One state of the machine, driven by lines of a script."""

    def __init__(self) -> None:
        self._rules = dict(DEFAULTS)
        self._state: State | None = None
        self.durable: list[tuple[float, Event]] = []

    @property
    def state(self) -> State:
        if self._state is None:
            whole = {f.name for f in fields(Rules) if f.type == "int"}
            rules = {k: int(v) if k in whole else v for k, v in self._rules.items()}
            self._state = initial_state(Rules(**rules), "theta0")  # type: ignore[arg-type]
        return self._state

    def play(self, line: str) -> list[str]:
        """What the machine does with one line of a script."""
        words = line.split()
        if words[0] == "rules":
            self._rules |= {k: float(v) for k, v in (w.split("=") for w in words[1:])}
            return []
        now, verb, args = float(words[0]), words[1], words[2:]
        if verb == "ask":
            return self._ask(now, *args)
        before = self.state
        lines = self._step(EVENTS[verb](self.state, *args), now)
        return [*lines, *([] if self.state == before else [summary(self.state)])]

    def _step(self, event: Event, now: float) -> list[str]:
        self._state, effects = step(self.state, event, now)
        refused = any(isinstance(effect, Refuse | Duplicate) for effect in effects)
        if event.durable and not refused:
            self.durable.append((now, event))
        lines = []
        for effect in effects:
            lines.append(describe(effect))
            if isinstance(effect, Emit):
                lines += self._step(effect.event, now)
        return lines

    def _ask(self, now: float, site: str, have_round: str, theta: str = "") -> list[str]:
        """What WaitRound does: say what the site holds, then answer what it may do."""
        theta = theta or f"theta{have_round}"
        ready = caught_up(self.state, site, int(have_round), theta)
        lines = [] if ready is None else [f"{ready}", *self._step(ready, now)]
        answer = directive(self.state, site, int(have_round), theta)
        if isinstance(answer, Refuse):
            return [*lines, describe(answer)]
        lines.append(f"{answer[0]}: {answer[1]}")
        return [*lines, *([summary(self.state)] if ready else [])]


def _stored(state: State, site: str, shard: str = "0/1", *options: str) -> ShardStored:
    index, count = shard.split("/")
    given = dict(option.split("=") for option in options)
    known = state.sites.get(site)
    return ShardStored(
        site=site,
        incarnation=int(given.get("inc", known.incarnation if known else 1)),
        round=int(given.get("round", state.round)),
        fragment=int(given.get("fragment", 0)),
        shard=int(index),
        num_shards=int(count),
        size_bytes=100,
        digest=given.get("digest", f"{site}-{index}"),
        tokens=int(given.get("tokens", 1000)),
        inner_steps=15,
        data_cursor=int(given.get("cursor", 15 * (state.round + 1))),
    )


def _refused(state: State, site: str, reason: str, *options: str) -> ShardRefused:
    given = dict(option.split("=") for option in options)
    return ShardRefused(
        site=site,
        incarnation=state.sites[site].incarnation,
        round=state.round,
        shard=int(given.get("shard", 0)),
        data_cursor=int(given.get("cursor", 15 * (state.round + 1))),
        reason=reason,
    )


def _committed(state: State) -> RoundCommitted:
    return RoundCommitted(
        round=state.round,
        update_bytes=500,
        update_digest=f"update{state.round}",
        theta_digest=f"theta{state.round + 1}",
    )


def _incarnation(state: State, site: str, given: tuple[str, ...]) -> int:
    return int(given[0].removeprefix("inc=")) if given else state.sites[site].incarnation


EVENTS: dict[str, Callable[..., Event]] = {
    "join": lambda state, site, instance, ranks="1": SiteJoined(
        site=site, instance=instance, num_shards=int(ranks)
    ),
    "leave": lambda state, site, *inc: SiteLeft(
        site=site, incarnation=_incarnation(state, site, inc), reason="done"
    ),
    "heard": lambda state, site, *inc: Heard(site=site, incarnation=_incarnation(state, site, inc)),
    "push": _stored,
    "malformed": lambda state, site, *options: _refused(state, site, "payload", *options),
    "corrupt": lambda state, site, *options: _refused(state, site, "corrupt", *options),
    "reduced": _committed,
    "tick": lambda state: Tick(),
    "recovered": lambda state: Recovered(),
    "set": lambda state, key, value: SettingChanged(key=key, value=float(value)),
    "hold": lambda state, hold: HoldChanged(hold=hold),
    "evict": lambda state, site: SiteEvicted(site=site),
    "readmit": lambda state, site: SiteReadmitted(site=site),
    "snapshot": lambda state: SnapshotRequested(),
}


def describe(effect: Effect) -> str:
    match effect:
        case Refuse(reason=reason, message=message):
            return f"refuse {reason}: {message}"
        case Duplicate():
            return "duplicate"
        case Emit(event=event):
            return f"{event}"
        case Reduce(round=round_, included=included):
            return f"reduce round {round_}: {', '.join(included)}"
        case Say(message=message):
            return f"say: {message}"


def summary(state: State) -> str:
    """The state in one line."""
    strikes = {n: f"!{s.refusals}" if s.refusals else "" for n, s in state.sites.items()}
    sites = " ".join(
        f"{n}.{s.incarnation}={s.status}{strikes[n]}" for n, s in sorted(state.sites.items())
    )
    parts = [f"round {state.round} {state.phase}", f"[{sites}]"]
    if state.expected:
        parts.append(f"expects {','.join(state.expected)}")
    if state.contributions:
        have = (f"{n}:{len(c.digests)}/{c.num_shards}" for n, c in state.contributions.items())
        parts.append(f"has {','.join(sorted(have))}")
    if state.settings:
        parts.append(" ".join(f"{k}={v:g}" for k, v in sorted(state.settings.items())))
    if state.hold != "none":
        parts.append(state.hold)
    return "= " + "; ".join(parts)


def transcript(text: str) -> str:
    """Play the script of a golden file; the same file as the machine writes it now."""
    player, out = Player(), []
    for line in text.splitlines():
        if line.startswith("#") or not line.strip():
            out.append(line)
        elif line.startswith(">"):
            out += [line, *(f"    {answer}" for answer in player.play(line[1:]))]
    return "\n".join(out) + "\n"
