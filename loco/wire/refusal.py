"""From a failed call to the coordinator's refusal, if it was one."""

from __future__ import annotations

import grpc

from loco.errors import RefusedError
from loco.wire.protocol import REASON_KEY


def refusal_of(error: grpc.RpcError) -> RefusedError | None:
    """The refusal that the trailing metadata carries; None for failures of any other kind."""
    assert isinstance(error, grpc.Call)  # every error of a stub is one
    trailing = dict(iter(error.trailing_metadata() or ()))
    reason = trailing.get(REASON_KEY)
    return RefusedError(str(error.details()), reason=str(reason)) if reason else None


def describe(error: grpc.RpcError) -> str:
    """A failure in one line."""
    return f"{error.code().name.lower()}: {error.details()}"
