"""Several connections of one rank to the coordinator, for what one cannot carry fast enough.

A TCP connection has no more under way than its buffers hold. Linux lets the sender's grow to 4 MB
(net.ipv4.tcp_wmem), which on a round trip of 100 ms is 320 Mbit/s, however wide the line is. So
transfers that are worth it are cut in parts, and the parts go side by side, each with an offset of
its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

from loco.wire.access import Access, Link
from loco.wire.protocol import CHANNEL_OPTIONS

PartT = TypeVar("PartT")
T = TypeVar("T")

LANES = 8
"""Of a site, or one a rank where it has more ranks."""
LANE_BYTES = 1024 * 1024
"""A part is at least so long. Also where bytes are few: 7.5 MB took 0.33 s on one connection, which
begins slowly after each pause (1 Gbit/s, 100 ms), and 0.18 s on seven."""
# Without a subchannel pool of its own a channel would share the connection of the others.
_OWN_CONNECTION = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))


def num_parts(num_bytes: int, num_ranks: int) -> int:
    """In how many parts a transfer of one rank is cut, where so many do the same at once.

    Ranks share the site's connections, so that what a site asks of the coordinator does not grow
    with the product of both.
    """
    return max(1, min(LANES // num_ranks, num_bytes // LANE_BYTES))


def cut(span: range, num_ranks: int) -> list[range]:
    """Bytes of a transfer in `num_parts` parts of about equal length."""
    parts, size = num_parts(len(span), num_ranks), len(span)
    ends = [span.start + i * size // parts for i in range(parts + 1)]
    return [range(ends[i], ends[i + 1]) for i in range(parts)]


class Moved:
    """Bytes of one direction, and the seconds in which any of them were on their way.

    Parts that go side by side count their time once, so that the quotient is what the line gave.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.seconds = 0.0
        self._under_way = 0
        self._since = 0.0
        self._lock = threading.Lock()

    @contextmanager
    def moving(self, num_bytes: int) -> Iterator[None]:
        """A transfer of so many bytes, which count if it ends well."""
        with self._lock:
            if self._under_way == 0:
                self._since = time.monotonic()
            self._under_way += 1
        try:
            yield
            with self._lock:
                self.num_bytes += num_bytes
        finally:
            with self._lock:
                self._under_way -= 1
                if self._under_way == 0:
                    self.seconds += time.monotonic() - self._since


class Lanes:
    """The connections, each opened when it is first needed; and a thread for each."""

    def __init__(self, address: str, access: Access) -> None:
        self.first = Link(address, access)
        """Of all calls that are no transfers, too."""
        self._address = address
        self._access = access
        self._others: list[Link] = []
        self._free: list[Link] = [self.first]
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(LANES, thread_name_prefix="lane")

    def start(self, transfer: Callable[[Link], T]) -> Future[T]:
        """Begin a transfer on a connection that no other one uses."""
        return self._threads.submit(self._on_a_lane, transfer)

    def each(self, transfer: Callable[[Link, PartT], T], parts: Sequence[PartT]) -> list[T]:
        """`transfer` for each part, side by side; the results in order of the parts.

        When all have ended, it raises what the first of those raised that failed.
        """
        if len(parts) == 1:
            return [transfer(self.first, parts[0])]
        transfers = [self.start(lambda link, part=part: transfer(link, part)) for part in parts]  # type: ignore[misc]
        wait(transfers)
        return [done.result() for done in transfers]

    def close(self) -> None:
        """End all calls; those of other threads raise."""
        with self._lock:
            for link in (self.first, *self._others):
                link.close()
        self._threads.shutdown(wait=False)

    def _on_a_lane(self, transfer: Callable[[Link], T]) -> T:
        link = self._take()
        try:
            return transfer(link)
        finally:
            with self._lock:
                self._free.append(link)

    def _take(self) -> Link:
        with self._lock:
            if self._free:  # the oldest: one that has rested for long begins slowly again
                link = min(self._free, key=[self.first, *self._others].index)
                self._free.remove(link)
                return link
            link = Link(self._address, self._access, _OWN_CONNECTION)
            self._others.append(link)
            return link
