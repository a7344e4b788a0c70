"""What operators may ask for, from the wire's words to events of the round machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pydantic import BaseModel, ValidationError

from coordinator.events import (
    Event,
    HoldChanged,
    SettingChanged,
    SiteEvicted,
    SiteReadmitted,
    SnapshotRequested,
)
from coordinator.refused import RefusedRequest
from coordinator.state import State
from loco.config import CodecConfig, InnerConfig, OuterConfig
from loco.wire.v1 import coordinator_pb2 as pb

# Settings that may change while the run goes on, with the config's own ranges.
SETTINGS: dict[str, tuple[type[BaseModel], str]] = {
    "outer.alpha": (OuterConfig, "alpha"),
    "codec.k": (CodecConfig, "k"),
    "inner.steps": (InnerConfig, "steps"),
}


@dataclass(frozen=True, kw_only=True)
class Order:
    """An event to submit, and what it will do, in words."""

    event: Event
    message: str


def order_of(request: pb.ControlRequest, state: State) -> Order:
    """The order that a request stands for; RefusedRequest says what is possible instead."""
    verbs: dict[pb.ControlVerb.ValueType, Callable[[], Order]] = {
        pb.CONTROL_VERB_SET: lambda: _set(request, state),
        pb.CONTROL_VERB_PAUSE: lambda: Order(
            event=HoldChanged(hold="paused"),
            message=f"no round opens after {_open_round(state)}, until resume",
        ),
        pb.CONTROL_VERB_RESUME: lambda: Order(
            event=HoldChanged(hold="none"), message="rounds open again"
        ),
        pb.CONTROL_VERB_DRAIN: lambda: Order(
            event=HoldChanged(hold="draining"),
            message=f"all sites are let go after {_open_round(state)}; "
            "resume and start the workers again to go on",
        ),
        pb.CONTROL_VERB_EVICT: lambda: Order(
            event=SiteEvicted(site=request.site),
            message=f"site {request.site} is out; what it contributed in full still counts",
        ),
        pb.CONTROL_VERB_READMIT: lambda: Order(
            event=SiteReadmitted(site=request.site), message=f"site {request.site} may join again"
        ),
        pb.CONTROL_VERB_SNAPSHOT: lambda: Order(
            event=SnapshotRequested(),
            message=f"a snapshot is written after {_open_round(state)}"
            if state.phase in ("open", "closing")
            else f"a snapshot of round {state.round} is written now",
        ),
    }
    if request.verb not in verbs:
        raise RefusedRequest("control", f"unknown control verb {request.verb}")
    return verbs[request.verb]()


def _set(request: pb.ControlRequest, state: State) -> Order:
    if request.key not in SETTINGS:
        raise RefusedRequest(
            "control",
            f"{request.key!r} cannot be changed while the run goes on; {', '.join(SETTINGS)} can",
        )
    section, field = SETTINGS[request.key]
    try:
        checked = section.model_validate_strings({field: request.value})
    except ValidationError as error:
        raise RefusedRequest(
            "control", f"{request.key} = {request.value!r}: {error.errors()[0]['msg']}"
        ) from error
    value = float(getattr(checked, field))
    effective = state.round if state.phase == "gathering" else state.round + 1
    return Order(
        event=SettingChanged(key=request.key, value=value),
        message=f"{request.key} = {value:g} from round {effective} on, at all sites",
    )


def _open_round(state: State) -> str:
    return f"round {state.round}" if state.phase in ("open", "closing") else "this moment"
