"""The status document: one source for `loco status`, /status.json, the page and the demo's table.

Its keys are described in docs/protocol.md, "Status document".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from coordinator.admission import waiting_for
from coordinator.settings import settings_document
from coordinator.state import Site, State
from coordinator.told import Told
from loco.metrics import DIRECTIONS

if TYPE_CHECKING:
    from coordinator.monitor import Monitor

SHOWN_LEFT = 64
LAST_ROUNDS = 10  # over which the site's time is shared out

# What bounds a site is the group of phases that takes most of its time; `sync` is its start.
_BOUNDS = {
    "compute": ("compute", "eval"),
    "codec": ("encode", "apply"),
    "uplink": ("push",),
    "downlink": ("pull",),
    "waiting": ("wait",),
}


def status_document(monitor: Monitor, state: State, now: float) -> dict[str, Any]:
    """Where the run stands."""
    last = state.updates.get(state.round - 1)
    store, history = monitor.store, monitor.history
    measured = [
        {"round": round_, "bits_per_byte": history.run.get("validation_bits_per_byte", round_)}
        for round_ in history.rounds
    ]
    return {
        "run_id": store.run_id,
        "round": state.round,
        "rounds": state.rules.rounds,
        "phase": state.phase,
        "hold": state.hold,
        "waiting_for": waiting_for(state),
        "plaintext": monitor.plaintext,
        "settings": settings_document(store.config, state),
        "snapshot_due": state.snapshot_due,
        "seconds_a_round": _seconds_a_round(monitor, state.round),
        "params": store.layout.num_parameters,
        "dense_bytes_per_round": store.layout.dense_bytes,
        "theta_digest": state.theta_digest,
        "now": round(now, 3),
        "uptime_seconds": round(now - monitor.started_at, 1),
        "sites_registered": len(state.sites),
        "sites_alive": sum(site.alive for site in state.sites.values()),
        "sites_included": len(last.included) if last else 0,
        "update_bytes": last.size_bytes if last else 0,
        "bits_per_value_up": monitor.bits_per_value_up,
        "validation": [m for m in measured if m["bits_per_byte"] == m["bits_per_byte"]],  # not NaN
        "sites": [_site(monitor, name, state.sites[name], state) for name in _shown(state)],
        "refusals": [asdict(note) for note in reversed(monitor.refusals)],
        "notes": [asdict(note) for note in reversed(monitor.notes)],
        "config": store.config.model_dump(mode="json"),
    }


def _shown(state: State) -> list[str]:
    """Names of all sites, but of those that left only the last ones."""
    left = [name for name, site in state.sites.items() if site.status == "left"]
    left.sort(key=lambda name: state.sites[name].heard_at)
    return sorted(state.sites.keys() - left[:-SHOWN_LEFT])


def _seconds_a_round(monitor: Monitor, round_: int) -> float | None:
    """Mean time from commit to commit over the last rounds; None before there are two."""
    rounds = [r for r in monitor.history.rounds if round_ - LAST_ROUNDS - 1 <= r < round_]
    if len(rounds) < 2:
        return None
    first, last = (monitor.history.run.get("committed_at", r) for r in (rounds[0], rounds[-1]))
    return round((last - first) / (len(rounds) - 1), 3)


def _site(monitor: Monitor, name: str, site: Site, state: State) -> dict[str, Any]:
    told = monitor.told.get(name) or Told(incarnation=site.incarnation, baseline_known=False)
    last = state.updates.get(state.round - 1)
    included = last.included.get(name) if last else None
    lately = monitor.history.phase_sums(name, LAST_ROUNDS)
    # Since the run began, or since the coordinator last crashed.
    by_kind: dict[str, dict[str, int]] = {way: {} for way in DIRECTIONS}
    for (who, way, kind), num_bytes in monitor.bytes.items():
        if who == name:
            by_kind[way][kind] = num_bytes
    return {
        "name": name,
        "status": site.status,
        "incarnation": site.incarnation,
        "ranks": told.ranks,
        "members": told.membership.members,
        "member_changes": told.membership.changes,
        "quorums": told.membership.quorums,
        "quorum_seconds": told.membership.quorum_seconds,
        "failed_commits": told.membership.failed_commits,
        "healed_bytes": told.membership.healed_bytes,
        "shard_lost_fraction": told.membership.lost_fraction,
        "phase": told.phase,
        "round": told.round,
        "theta_digest": told.theta_digest,
        "theta_agrees": _agrees(told, state),
        "inner_steps": told.inner_steps,
        "tokens": site.tokens_included,
        "rounds_included": site.rounds_included,
        "contribution_bytes": included.size_bytes if included else 0,
        "train_bits_per_byte": told.train_bits_per_byte,
        "ef_norm": told.ef_norm,
        "in_site_bytes": told.in_site_bytes,
        "phase_seconds": dict(told.phase_seconds),
        "phase_seconds_lately": {phase: round(s, 3) for phase, s in lately.items()},
        "bound": bound(lately),
        **{f"bytes_{way}": sum(by_kind[way].values()) for way in DIRECTIONS},
        **{f"bytes_{way}_by_kind": by_kind[way] for way in DIRECTIONS},
        **{f"goodput_{way}": told.goodput.get(way) for way in DIRECTIONS},
    }


def _agrees(told: Told, state: State) -> bool | None:
    """Whether the theta that the site reports is the run's at that round; None: not known."""
    expected = state.digests.get(told.round)
    return told.theta_digest == expected if told.theta_digest and expected else None


def bound(phase_seconds: Mapping[str, float]) -> str | None:
    """What takes most of a site's time; None before it has spent any."""
    sums = {
        word: sum(phase_seconds.get(p, 0.0) for p in phases) for word, phases in _BOUNDS.items()
    }
    return max(sums, key=lambda word: sums[word]) if any(sums.values()) else None
