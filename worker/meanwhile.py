"""Waiting for the network without wasting the time: a call runs in a thread, inner steps go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from worker.pulse import Pulse
from worker.session import Session
from worker.site import Site

T = TypeVar("T")

VOTE_SECONDS = 2.0  # between two looks at whether all ranks are done
AWAY_SECONDS = 5.0  # without an answer: then inner steps go on


class Meanwhile:
    """Runs a rank's network call in a thread, while all ranks of the site decide together.

    As long as any rank is not done, `step` is called on all ranks alike and told whether the
    coordinator does not answer; it returns False when the site may make no further inner step.
    """

    def __init__(
        self, site: Site, session: Session, pulse: Pulse, step: Callable[[bool], bool]
    ) -> None:
        self._site = site
        self._session = session
        self._pulse = pulse
        self._step = step
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="network")
        self.waited_seconds = 0.0
        """Time in which this rank could do nothing but wait, since the start."""

    def do(self, work: Callable[[], T], *, lets_in: bool = False) -> T:
        """The result of `work`; an error of any rank is raised by all ranks alike.

        Args:
            lets_in: ranks that have come back need not wait for its end: MembersChanged then.
        """
        future = self._thread.submit(work)
        pending, away = self._vote(future)
        while pending:
            stepped = self._step(away)
            if not stepped:
                started = time.monotonic()
                wait([future], VOTE_SECONDS)
                self.waited_seconds += time.monotonic() - started
            pending, away = self._vote(future)
            if pending and lets_in and not stepped:
                self._site.begin()
        return self._site.together(future.result)

    def _vote(self, future: Future[T]) -> tuple[bool, bool]:
        """Whether any rank is not done, and whether any gets no answer; equal on all ranks."""
        silent = max(self._session.away_seconds, self._pulse.silent_seconds) > AWAY_SECONDS
        pending, away = self._site.sum(float(not future.done()), float(silent))
        return pending > 0, away > 0
