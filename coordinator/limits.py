"""What one caller may ask for: requests a second, and calls at a time.

Callers are told apart by their certificate, or by their connection where there is none.
"""

from __future__ import annotations

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
    """Requests that may still be made; it fills with time."""

    left: float
    at: float


class Limits:
    """The accounts of all callers."""

    def __init__(self, config: LimitsConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._calls: Counter[str] = Counter()

    @contextlib.contextmanager
    def call(self, caller: str) -> Iterator[None]:
        """Account for one call while it runs; RefusedRequest if it is one too many."""
        self._take_request(caller)
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

    def _take_request(self, caller: str) -> None:
        rate, now = self._config.requests_per_second, self._clock()
        most = rate * self._config.burst_seconds
        bucket = self._buckets.get(caller)
        if bucket is None:
            bucket = self._buckets[caller] = _Bucket(left=most, at=now)
            if len(self._buckets) > _MOST_CALLERS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(caller)
        bucket.left = min(most, bucket.left + (now - bucket.at) * rate)
        bucket.at = now
        if bucket.left < 1:
            raise RefusedRequest(
                "rate",
                f"{caller} makes more than {rate:g} requests a second "
                "(limits.requests_per_second): wait before the next one",
            )
        bucket.left -= 1
