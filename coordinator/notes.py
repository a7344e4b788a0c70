"""What operators read: refusals, what became of sites, and what was ordered, in words."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.events import (
    Event,
    HoldChanged,
    Say,
    SettingChanged,
    SiteEvicted,
    SiteReadmitted,
    SnapshotRequested,
)


def printable(text: str) -> str:
    """What a caller wrote, for logs and terminals: no new line, no control sequence."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


@dataclass(frozen=True, kw_only=True)
class Note:
    """Something that an operator wants to read: a refusal, or what became of a site."""

    at: float  # Unix seconds
    what: str  # reason of the refusal; or joined, left, lost, returned, late
    message: str


def order_words(event: Event | Say) -> tuple[str, str] | None:
    """For what an operator ordered: the order (a label of loco_orders_total), and a sentence."""
    match event:
        case SettingChanged(key=key, value=value):
            return "set", f"set {key} to {value:g}, from the next round on"
        case HoldChanged(hold="paused"):
            return "pause", "paused the run"
        case HoldChanged(hold="draining"):
            return "drain", "drained the run: all sites are let go"
        case HoldChanged():
            return "resume", "resumed the run"
        case SiteEvicted(site=site):
            return "evict", f"evicted site {site}"
        case SiteReadmitted(site=site):
            return "readmit", f"readmitted site {site}"
        case SnapshotRequested():
            return "snapshot", "asked for a snapshot"
    return None
