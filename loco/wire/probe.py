"""How far the coordinator is: round trip, rates both ways, and what its clock says.

Every probe is bounded by `PROBE_BYTES` and `PROBE_SECONDS`, and the coordinator answers one at a
time. Rates include TCP's slow start, so on long fast links they come out low.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import grpc

from loco.wire.access import Link
from loco.wire.protocol import (
    PROBE_BLOCK_BYTES,
    PROBE_BYTES,
    PROBE_SECONDS,
    PROTOCOL_VERSION,
)
from loco.wire.v1 import coordinator_pb2 as pb

_CALL_SECONDS = 30.0
_PINGS = 5


@dataclass(frozen=True, kw_only=True)
class Way:
    """What `measure` found."""

    rtt_seconds: float
    """The shortest of several."""
    clock_offset_seconds: float
    """The coordinator's clock less ours; off by half a round trip at most."""
    up_bytes_per_second: float
    down_bytes_per_second: float
    version: str
    """Of the coordinator's loco."""


def measure(link: Link) -> Way:
    """Probe the coordinator for a few seconds.

    Raises:
        UnreachableError, RefusedError: as it answers, or does not; another probe that is running
            is a RefusedError with the reason `too_many_calls`.
    """
    try:
        _ping(link)  # connects
        rtt, offset, version = min(_ping(link) for _ in range(_PINGS))
        return Way(
            rtt_seconds=rtt,
            clock_offset_seconds=offset,
            up_bytes_per_second=_up(link, rtt),
            down_bytes_per_second=_down(link),
            version=version,
        )
    except grpc.RpcError as error:
        raise link.failure(error) from None


def _ping(link: Link) -> tuple[float, float, str]:
    """(round trip in seconds, the coordinator's clock less ours, its version)."""
    asked, started = time.time(), time.monotonic()
    (answer,) = link.stub.Probe(_requests(), timeout=_CALL_SECONDS)
    rtt = time.monotonic() - started
    return rtt, answer.unix_seconds - (asked + rtt / 2), answer.version


def _up(link: Link, rtt: float) -> float:
    started = time.monotonic()
    (answer,) = link.stub.Probe(_requests(up=True), timeout=_CALL_SECONDS)
    return float(answer.received_bytes / max(1e-6, time.monotonic() - started - rtt))


def _down(link: Link) -> float:
    answers = link.stub.Probe(_requests(download_bytes=PROBE_BYTES), timeout=_CALL_SECONDS)
    next(answers)
    started, received = time.monotonic(), 0
    for answer in answers:
        received += len(answer.data)
    return received / max(1e-6, time.monotonic() - started)


def _requests(*, up: bool = False, download_bytes: int = 0) -> Iterator[pb.ProbeRequest]:
    yield pb.ProbeRequest(protocol_version=PROTOCOL_VERSION, download_bytes=download_bytes)
    if up:
        data, until = os.urandom(PROBE_BLOCK_BYTES), time.monotonic() + PROBE_SECONDS
        for _ in range(PROBE_BYTES // PROBE_BLOCK_BYTES):
            if time.monotonic() >= until:
                return
            yield pb.ProbeRequest(data=data)
