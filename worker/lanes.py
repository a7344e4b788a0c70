"""Several connections of one rank to the coordinator, for what one cannot carry fast enough.

A TCP connection has no more under way than its buffers hold. Linux lets the sender's grow to 4 MB
(net.ipv4.tcp_wmem), which on a round trip of 100 ms is 320 Mbit/s, however wide the line is. So
transfers that are worth it are cut in parts, and the parts go side by side, each with an offset of
its own. What is fetched is cut while it comes: connections get unequal shares of a line, and who
takes which bytes is decided when a connection is free for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

from loco.wire.access import Access, Link
from loco.wire.protocol import CHANNEL_OPTIONS

T = TypeVar("T")

LANES = 8
"""Of a site, or one a rank where it has more ranks."""
LANE_BYTES = 1024 * 1024
"""A part is at least so long. Also where bytes are few: 7.5 MB took 0.33 s on one connection, which
begins slowly after each pause (1 Gbit/s, 100 ms), and 0.18 s on seven."""
STREAMS = 3
"""Ranges that a connection fetches at a time: a request takes a round trip, and so long the others
must last (at 1 Gbit/s and 100 ms two of 1 MiB do not: 93 % of the line instead of 97)."""
# Without a subchannel pool of its own a channel would share the connection of the others.
_OWN_CONNECTION = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))


def num_parts(num_bytes: int, num_ranks: int) -> int:
    """In how many parts a transfer of one rank is cut, where so many do the same at once.

    Ranks share the site's connections, so that what a site asks of the coordinator does not grow
    with the product of both.
    """
    return max(1, min(LANES // num_ranks, num_bytes // LANE_BYTES))


class Ranges:
    """A span that is handed out range by range, to whoever is free.

    Long ranges first, so that requests grow with the logarithm of the span only, but none so long
    that who gets a quarter of a fair share would hold up the rest; `LANE_BYTES` at the end, so that
    all end at about the same time.
    """

    def __init__(self, span: range, num_takers: int) -> None:
        self._left = span
        self._num_takers = num_takers
        self._lock = threading.Lock()

    def take(self) -> range | None:
        """The next bytes; None if there are no more."""
        with self._lock:
            size = max(LANE_BYTES, len(self._left) // (4 * self._num_takers))
            taken, self._left = self._left[:size], self._left[size:]
        return taken or None

    def close(self) -> None:
        """The rest is not wanted any more."""
        with self._lock:
            self._left = range(0)


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
        self._fetching = ThreadPoolExecutor(LANES * STREAMS, thread_name_prefix="fetch")

    def start(self, transfer: Callable[[Link], T]) -> Future[T]:
        """Begin a transfer on a connection that no other one uses."""
        return self._threads.submit(self._on_a_lane, transfer)

    def share(self, span: range, num_lanes: int, transfer: Callable[[Link, range], None]) -> None:
        """`transfer` for ranges that make up `span`, on so many connections side by side.

        When all have ended, it raises what the first of those raised that failed; what nobody had
        begun by then stays where it is.
        """
        if num_lanes == 1:
            transfer(self.first, span)
            return
        links = [self._take() for _ in range(num_lanes)]
        ranges = Ranges(span, num_lanes * STREAMS)
        try:
            fetchers = [
                self._fetching.submit(_fetch, link, taken, ranges, transfer)
                for link in links * STREAMS
                if (taken := ranges.take())
            ]
            wait(fetchers)
        finally:
            ranges.close()
            self._give_back(links)
        for done in fetchers:
            done.result()

    def close(self) -> None:
        """End all calls; those of other threads raise."""
        with self._lock:
            for link in (self.first, *self._others):
                link.close()
        self._threads.shutdown(wait=False)
        self._fetching.shutdown(wait=False)

    def _on_a_lane(self, transfer: Callable[[Link], T]) -> T:
        link = self._take()
        try:
            return transfer(link)
        finally:
            self._give_back([link])

    def _take(self) -> Link:
        with self._lock:
            if self._free:  # the oldest: one that has rested for long begins slowly again
                link = min(self._free, key=[self.first, *self._others].index)
                self._free.remove(link)
                return link
            link = Link(self._address, self._access, _OWN_CONNECTION)
            self._others.append(link)
            return link

    def _give_back(self, links: list[Link]) -> None:
        with self._lock:
            self._free.extend(links)


def _fetch(
    link: Link, taken: range | None, ranges: Ranges, transfer: Callable[[Link, range], None]
) -> None:
    try:
        while taken:
            transfer(link, taken)
            taken = ranges.take()
    except BaseException:
        ranges.close()
        raise
