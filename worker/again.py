"""When a call to the coordinator that failed is worth another attempt."""

from __future__ import annotations

import grpc

from loco.errors import UnreachableError
from loco.wire.refusal import describe, refusal_of

# Answers that mean "not now": the coordinator is starting, stopping (which cancels calls), out of
# reach or has failed, or bytes were damaged on the way.
_TRY_AGAIN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)
# Refusals that time or an operator resolves while the site waits: a full disk, a coordinator with
# an older copy of its state or an empty one, which the site's progress and EF must survive; a
# certificate that ended, for the bundle may be renewed; and limits.
_WAIT_FOR = ("disk_full", "ahead", "run_id", "expired", "rate", "slow", "quota", "too_many_calls")


class DamagedBlockError(Exception):
    """A block came with another checksum than it left with; it is fetched again."""


def check_hope(error: grpc.RpcError, address: str, *, closed: bool) -> bool:
    """Return where another attempt may help: whether the coordinator has answered.

    Args:
        closed: by this side, which is why calls end.

    Raises:
        RefusedError: no time and no operator resolves it.
        UnreachableError: what answers at `address` is no coordinator, or the session is closed.
    """
    refused = refusal_of(error)
    if refused is not None and refused.reason not in _WAIT_FOR:
        raise refused from None
    if refused is None and error.code() == grpc.StatusCode.UNIMPLEMENTED:
        raise UnreachableError(
            f"what answers at {address} does not know this call ({describe(error)}): it is another "
            "service or another version; check the address, and install the same version of loco "
            "on both sides"
        ) from None
    if closed or (refused is None and error.code() not in _TRY_AGAIN):
        raise UnreachableError(f"the coordinator at {address} failed: {describe(error)}") from None
    return refused is not None
