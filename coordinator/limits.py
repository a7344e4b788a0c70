"""What one caller may ask for: requests and messages a second, and calls at a time.

Callers are told apart by their certificate.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from coordinator.refused import RefusedRequest
from loco.config import LimitsConfig

_MOST_CALLERS = 4096  # remembered; whoever is pushed out begins with a full bucket


@dataclass
class _Bucket:
    """What may still be had; it fills with time."""

    left: float
    at: float


class _Buckets:
    """One bucket a caller, with `rate` a second and at most `most` at once."""

    def __init__(self, rate: float, most: float) -> None:
        self._rate = rate
        self._most = most
        self._of: OrderedDict[str, _Bucket] = OrderedDict()

    def take(self, caller: str, now: float, count: float = 1.0) -> float:
        """Take so many, a full bucket at most; seconds until they would have been there, 0 if they
        were."""
        count = min(count, self._most)
        bucket = self._of.get(caller)
        if bucket is None:
            bucket = self._of[caller] = _Bucket(left=self._most, at=now)
            if len(self._of) > _MOST_CALLERS:
                self._of.popitem(last=False)
        self._of.move_to_end(caller)
        bucket.left = min(self._most, bucket.left + (now - bucket.at) * self._rate)
        bucket.at = now
        if bucket.left < count:
            return (count - bucket.left) / self._rate
        bucket.left -= count
        return 0.0


class Limits:
    """The accounts of all callers."""

    def __init__(self, config: LimitsConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        burst = config.burst_seconds
        rate = config.requests_per_second
        self._requests = _Buckets(rate, max(1.0, rate * burst))
        rate = config.messages_per_second
        self._messages = _Buckets(rate, max(1.0, rate * burst))
        self._calls: Counter[str] = Counter()

    @contextlib.contextmanager
    def call(self, caller: str, counts_as: float = 1.0) -> Iterator[None]:
        """Account for one call while it runs; RefusedRequest if it is one too many.

        `counts_as` so many requests of the rate.
        """
        if self._requests.take(caller, self._clock(), counts_as):
            raise RefusedRequest(
                "rate",
                f"{caller} makes more than {self._config.requests_per_second:g} requests a second "
                "(limits.requests_per_second): wait before the next one",
            )
        if self._calls[caller] >= self._config.calls_at_once:
            raise RefusedRequest(
                "too_many_calls",
                f"{caller} has {self._calls[caller]} calls in progress, "
                f"limits.calls_at_once allows {self._config.calls_at_once}: wait for their ends",
            )
        self._calls[caller] += 1
        try:
            yield
        finally:
            self._calls[caller] -= 1
            if not self._calls[caller]:
                del self._calls[caller]

    async def message(self, caller: str) -> None:
        """Before each message of a stream: waits while they come too fast, so that flow control
        slows the sender down."""
        while wait := self._messages.take(caller, self._clock()):
            await asyncio.sleep(wait)
