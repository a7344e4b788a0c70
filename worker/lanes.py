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
SHARDS = 48
"""Of a site's contribution at most, or one a rank: several a connection, so that the first leaves
while the others are encoded, and a fast connection takes more of them."""
STREAMS = 3
"""Ranges that a connection fetches at a time: a request takes a round trip, and so long the others
must last (at 1 Gbit/s and 100 ms two of 1 MiB do not: 93 % of the line instead of 97)."""
# Without a subchannel pool of its own a channel would share the connection of the others.
_OWN_CONNECTION = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))


def lanes_a_rank(num_ranks: int) -> int:
    """Connections of a rank: ranks share the site's, so that what a site asks of the coordinator
    does not grow with the product of both."""
    return max(1, LANES // num_ranks)


def num_lanes(num_bytes: int, num_ranks: int) -> int:
    """On how many connections a rank fetches so much, where so many ranks do the same at once."""
    return max(1, min(lanes_a_rank(num_ranks), num_bytes // LANE_BYTES))


def num_shards(num_bytes: int, num_ranks: int) -> int:
    """In how many parts one of so many ranks uploads so much: where they are more than its
    connections, as many for each."""
    shards, lanes = min(SHARDS // num_ranks, num_bytes // LANE_BYTES), lanes_a_rank(num_ranks)
    return max(1, shards if shards < lanes else shards - shards % lanes)


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
    """The connections, each opened when it is first needed; and threads for what they carry."""

    def __init__(self, address: str, access: Access, num_lanes: int = LANES) -> None:
        self.first = Link(address, access)
        """Of all calls that are no transfers, too."""
        self._address = address
        self._access = access
        self._most = num_lanes
        self._links = [self.first]
        self._sending: set[Link] = set()
        self._changed = threading.Condition()
        self._uploads = ThreadPoolExecutor(num_lanes * STREAMS, thread_name_prefix="push")
        self._downloads = ThreadPoolExecutor(num_lanes * STREAMS, thread_name_prefix="fetch")

    def start(self, upload: Callable[[Link, Callable[[], None]], T]) -> Future[T]:
        """Begin an upload as soon as there is a connection on which no other one sends.

        It calls what it is given when its last byte has gone: the next one sends while it waits for
        its answer.
        """
        return self._uploads.submit(self._upload, upload)

    def share(self, span: range, num_lanes: int, transfer: Callable[[Link, range], None]) -> None:
        """`transfer` for ranges that make up `span`, on so many connections side by side.

        When all have ended, it raises what the first of those raised that failed; what nobody had
        begun by then stays where it is.
        """
        if num_lanes == 1:
            transfer(self.first, span)
            return
        with self._changed:
            links = [self._link(number) for number in range(num_lanes)]
        ranges = Ranges(span, num_lanes * STREAMS)
        try:
            fetchers = [
                self._downloads.submit(_fetch, link, taken, ranges, transfer)
                for link in links * STREAMS
                if (taken := ranges.take())
            ]
            wait(fetchers)
        finally:
            ranges.close()
        for done in fetchers:
            done.result()

    def close(self) -> None:
        """End all calls; those of other threads raise."""
        with self._changed:
            for link in self._links:
                link.close()
        self._uploads.shutdown(wait=False)
        self._downloads.shutdown(wait=False)

    def _upload(self, upload: Callable[[Link, Callable[[], None]], T]) -> T:
        with self._changed:
            self._changed.wait_for(lambda: len(self._sending) < self._most)
            links = (self._link(number) for number in range(self._most))
            # The oldest: one that has rested for long begins slowly again.
            link = next(link for link in links if link not in self._sending)
            self._sending.add(link)
        sent = False

        def free() -> None:
            nonlocal sent
            with self._changed:
                if not sent:  # else it is another one's by now
                    self._sending.remove(link)
                    self._changed.notify()
                sent = True

        try:
            return upload(link, free)
        finally:
            free()

    def _link(self, number: int) -> Link:
        if number == len(self._links):
            self._links.append(Link(self._address, self._access, _OWN_CONNECTION))
        return self._links[number]


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
