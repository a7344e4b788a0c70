"""Collectives on torchft's process group that notice when a member is lost."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from loco.inner.groups import Group
from worker.site import MembersChanged

FORM_SECONDS = 10.0  # members that have just met connect to each other
POLL = timedelta(seconds=0.25)


class ElasticGroup(Group):
    """The members of one meeting.

    On loss of a member every collective raises MembersChanged: the backend notices a closed
    connection, and `give_up` ends the wait for one that is silent.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, *, name: str, rank: int) -> None:
        super().__init__(process_group, rank=rank, alone=process_group is None)
        self.name = name
        self.told = False
        """Another member raised the alarm, so nobody needs to be told."""
        self._why = ""
        self._given_up = threading.Event()

    @classmethod
    def form(
        cls,
        device: torch.device,
        *,
        name: str,
        store: str,
        rank: int,
        size: int,
        longest: timedelta,
    ) -> ElasticGroup:
        """Connect to the other members, who call it too.

        Args:
            store: HOST:PORT of a TCPStore that all members reach.
            longest: of a collective; a lost member is noticed by the watch, before that.

        Raises:
            MembersChanged: one of them did not come.
        """
        if size == 1:
            return cls(None, name=name, rank=0)
        process_group = _process_group(device)
        try:
            process_group.configure(f"{store}/{name}", f"{rank}", rank, size)
            process_group.parent._get_backend(device)._set_default_timeout(longest)
        except (RuntimeError, dist.DistError) as error:
            raise MembersChanged(f"the group did not form: {error}") from error
        return cls(process_group, name=name, rank=rank)

    def give_up(self, why: str) -> None:
        """Called by another thread: end the wait for a member that is silent."""
        self._why = self._why or why
        self._given_up.set()

    @property
    def lost(self) -> str:
        """Why the group is of no use any more; empty while it is."""
        return self._why if self._given_up.is_set() else ""

    def start(self, collective: Callable[[Any], dist.Work]) -> Callable[[], None]:
        """As of a Group; MembersChanged if it cannot be done by exactly these members."""
        assert self._process_group is not None
        if self.lost:
            raise MembersChanged(self.lost)
        if self._process_group.size() != self.size:
            raise MembersChanged(
                f"the process group has {self._process_group.size()} members, not {self.size}"
            )
        try:
            work = collective(self._process_group)
        except RuntimeError as error:
            raise self._broken(error) from error
        return lambda: self._finish(work)

    def _finish(self, work: dist.Work) -> None:
        while True:
            try:
                # A plain wait cannot be ended: gloo's abort waits for the operation itself.
                work.wait(POLL)
            except RuntimeError as error:
                if self.lost:
                    raise MembersChanged(self.lost) from error
                if work.is_completed():
                    self._last_word(work)
                    return
            else:
                return

    def _last_word(self, work: dist.Work) -> None:
        """A completed operation says whether it failed, or only came just after the poll."""
        try:
            work.wait()
        except RuntimeError as error:
            raise self._broken(error) from error

    def _broken(self, error: RuntimeError) -> MembersChanged:
        said = re.sub(r"^\[\S+\] ", "", str(error).partition("\n")[0])  # without gloo's source line
        self.give_up(said.partition(" This is typically")[0])
        return MembersChanged(self.lost)

    def drop(self) -> threading.Thread | None:
        """Let go of the connections, in a thread; those that wait for this member notice."""
        self.give_up("the group was dropped")
        process_group, self._process_group = self._process_group, None
        if process_group is None:
            return None
        # gloo's destructor waits for operations that have lost their peer.
        thread = threading.Thread(target=_destroy, args=([process_group],), daemon=True)
        thread.start()
        return thread


def _destroy(last: list[Any]) -> None:
    last.pop().abort(errored=False)


def _process_group(device: torch.device) -> Any:
    from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL

    kind = ProcessGroupNCCL if device.type == "cuda" else ProcessGroupGloo
    return kind(timeout=timedelta(seconds=FORM_SECONDS))
