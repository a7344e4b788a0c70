"""Measurements of the way here, for `loco doctor`: a few MiB, one caller at a time."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from importlib.metadata import version

from google.protobuf.message import Message

from coordinator.refused import RefusedRequest
from loco.wire.protocol import PROBE_BLOCK_BYTES, PROBE_BYTES, PROBE_SECONDS
from loco.wire.v1 import coordinator_pb2 as pb

_PATIENCE_SECONDS = 4 * PROBE_SECONDS


class Probes:
    """Answers one probe at a time, so that measurements neither disturb one another nor add up."""

    def __init__(
        self, check_protocol: Callable[[int], None], count: Callable[[str, Message], None]
    ) -> None:
        """`count(direction, message)` is told of every message."""
        self._check_protocol = check_protocol
        self._count = count
        self._busy = False

    async def answer(
        self, requests: AsyncIterator[pb.ProbeRequest]
    ) -> AsyncIterator[pb.ProbeResponse]:
        """Take what comes, say how much it was, send what was asked for.

        On failure: RefusedRequest if another probe runs, or the bytes are too many or too slow.
        """
        if self._busy:
            raise RefusedRequest(
                "too_many_calls", "another probe is being answered: try again in a few seconds"
            )
        self._busy = True
        try:
            first, received = await self._receive(requests)
            response = pb.ProbeResponse(
                received_bytes=received, unix_seconds=time.time(), version=version("loco")
            )
            self._count("down", response)
            yield response
            until, left = time.monotonic() + PROBE_SECONDS, min(first.download_bytes, PROBE_BYTES)
            while left > 0 and time.monotonic() < until:
                response = pb.ProbeResponse(data=os.urandom(min(left, PROBE_BLOCK_BYTES)))
                left -= len(response.data)
                self._count("down", response)
                yield response
        finally:
            self._busy = False

    async def _receive(
        self, requests: AsyncIterator[pb.ProbeRequest]
    ) -> tuple[pb.ProbeRequest, int]:
        first, received = pb.ProbeRequest(), 0
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                async for request in requests:
                    self._count("up", request)
                    if request.protocol_version:
                        self._check_protocol(request.protocol_version)
                        first = request
                    received += len(request.data)
                    if received > PROBE_BYTES:
                        raise RefusedRequest("quota", f"a probe has at most {PROBE_BYTES} bytes")
        except TimeoutError:
            raise RefusedRequest(
                "slow", f"the probe took longer than {_PATIENCE_SECONDS:.0f} s: send less"
            ) from None
        self._check_protocol(first.protocol_version)
        return first, received
