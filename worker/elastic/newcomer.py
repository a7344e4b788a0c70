"""What a rank without a state does before it acts on a quorum.

A quorum tells who asked, and a member in a long step does not ask. While one lives that has the
state of the site it is waited for, whether the quorum names it or not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from worker.elastic.host import is_busy, says_of_itself
from worker.elastic.quorum import AGAIN_SECONDS, SAY_SECONDS, Lighthouse, Member, Quorum
from worker.site import MembersChanged

log = logging.getLogger("loco.worker")


def wait_for_steps(members: Sequence[Member], timeout_seconds: float) -> None:
    """Until none of them is busy: who trains hears of a new member when its step is over.

    Without a bound, said every 5 s, because the state is theirs: an evaluation may take an hour.

    Args:
        timeout_seconds: of each question; who does not answer is not waited for.
    """
    started = said = time.monotonic()
    while busy := next((m for m in members if is_busy(m, timeout_seconds)), None):
        if time.monotonic() - said > SAY_SECONDS:
            said = time.monotonic()
            log.info("waiting for %.0f s: %s is in a step or an evaluation", said - started, busy)
        time.sleep(AGAIN_SECONDS)


def check_that_nobody_has_a_state(
    lighthouse: Lighthouse, quorum: Quorum, timeout_seconds: float
) -> None:
    """Called before the site begins anew with the members of `quorum`.

    A member that does not ask for longer than the lighthouse's join timeout is in no quorum, though
    it lives; the site that began without it would supersede it at the coordinator.

    Raises:
        MembersChanged: a member that is not in the quorum lives and has the state of the site, or
            has begun it.
        OSError: the lighthouse did not tell who is there.
    """
    others = [member for member in lighthouse.everyone() if member not in quorum.members]

    def holds(member: Member) -> bool:
        said = says_of_itself(member, timeout_seconds)
        return said is not None and (said["state"] or said["busy"])

    with ThreadPoolExecutor(max(1, len(others))) as threads:  # the dead may not even refuse
        for member, holds_state in zip(others, threads.map(holds, others), strict=True):
            if holds_state:
                raise MembersChanged(f"{member} lives, has the state of the site and does not ask")
