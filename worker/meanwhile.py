"""Waiting for the network without wasting a partition: work goes on in a thread meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from worker.session import Session
from worker.site import Site

T = TypeVar("T")

VOTE_SECONDS = 2.0  # between two looks at whether all ranks are done
AWAY_SECONDS = 5.0  # without an answer: then inner steps go on


class Meanwhile:
    """Runs a rank's network call in a thread, while all ranks of the site decide together.

    As long as any rank is not done and the coordinator does not answer, `step` is called on all
    ranks alike; it returns False when the site may make no further inner step.
    """

    def __init__(self, site: Site, session: Session, step: Callable[[], bool]) -> None:
        self._site = site
        self._session = session
        self._step = step
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="network")

    def do(self, work: Callable[[], T]) -> T:
        """The result of `work`; an error of any rank is raised by all ranks alike."""
        future = self._thread.submit(work)
        patience = VOTE_SECONDS
        while not self._all_done(future, patience):
            patience = 0.0 if self._away() and self._step() else VOTE_SECONDS
        return self._site.together(future.result)

    def _all_done(self, future: Future[T], patience: float) -> bool:
        wait([future], patience)
        (pending,) = self._site.sum(float(not future.done()))
        return pending == 0

    def _away(self) -> bool:
        (longest,) = self._site.sum(float(self._session.away_seconds > AWAY_SECONDS))
        return longest > 0
