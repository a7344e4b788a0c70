"""From a failed call to the coordinator's refusal, if it was one."""

from __future__ import annotations

from typing import cast

import grpc

from loco.errors import RefusedError
from loco.wire.protocol import REASON_KEY


def refusal_of(error: grpc.RpcError) -> RefusedError | None:
    """The refusal that the trailing metadata carries; None for failures of any other kind."""
    call = cast(grpc.Call, error)  # what a stub raises is both; the type stubs know only one
    trailing = dict(iter(call.trailing_metadata() or ()))
    reason = trailing.get(REASON_KEY)
    return RefusedError(str(call.details()), reason=str(reason)) if reason else None


def describe(error: grpc.RpcError) -> str:
    """A failure in one line."""
    return f"{error.code().name.lower()}: {error.details()}"
