"""A rank without a state that would begin the site, beside members that live, are dead or busy.

Compared with: who has a state, at a real lighthouse and over real sockets.
Run alone: pytest tests/worker/elastic/test_newcomer.py
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator

import pytest
from support.lamp import Lamp

from worker.elastic import newcomer
from worker.elastic.host import Host, Rules
from worker.elastic.newcomer import check_that_nobody_has_a_state, wait_for_steps
from worker.elastic.quorum import Lighthouse, Member, Quorum
from worker.site import MembersChanged

os.environ["RUST_LOG"] = "error"  # read when torchft is imported
pytest.importorskip("torchft", reason="torchft has no wheel for this machine")

RULES = Rules(target_size=3, start_seconds=5.0, heal_seconds=1.0)


class Someone:
    """A member that answers others, and its line to the lighthouse."""

    def __init__(self, lamp: Lamp, slot: int) -> None:
        self.host = Host("127.0.0.1", RULES)
        self.me = Member.new(slot, self.host.address)
        self.line = Lighthouse(lamp.address, self.me, patience_seconds=60.0)

    def close(self) -> None:
        self.line.close()
        self.host.close()


@pytest.fixture
def lamp() -> Iterator[Lamp]:
    lamp = Lamp(join_timeout_seconds=0.5)
    lamp.light()
    yield lamp
    lamp.put_out()


@contextlib.contextmanager
def both(lamp: Lamp) -> Iterator[tuple[Someone, Someone]]:
    """One that has been in a quorum and asks no more, and one that comes later."""
    first, second = Someone(lamp, 1), Someone(lamp, 0)
    try:
        first.line.ask(0, anew=False)
        yield first, second
    finally:
        first.close()
        second.close()


def quorum_of(someone: Someone) -> Quorum:
    """What the lighthouse gives after its join time-out, to two of three; here to one of two."""
    return Quorum(2, (someone.me,))


def begin(someone: Someone) -> None:
    someone.line.ask_beside(0)
    deadline = time.monotonic() + 10.0
    while True:  # it is known from its first heartbeat
        try:
            check_that_nobody_has_a_state(someone.line, quorum_of(someone), 2.0)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        else:
            return


def test_who_has_a_state_and_does_not_ask_is_not_begun_without(lamp: Lamp) -> None:
    with both(lamp) as (survivor, fresh):
        survivor.host.has_state = lambda: True
        with pytest.raises(MembersChanged, match=r"rank 1 .* has the state of the site"):
            begin(fresh)


def test_who_is_about_to_enter_the_run_is_not_begun_beside(lamp: Lamp) -> None:
    """Its call to join is on its way, and another one would supersede it."""
    with both(lamp) as (entering, fresh):
        entering.host.is_busy = True
        with pytest.raises(MembersChanged, match="rank 1 "):
            begin(fresh)


def test_who_is_dead_or_has_no_state_is_not_waited_for(lamp: Lamp) -> None:
    with both(lamp) as (other, fresh):
        begin(fresh)
        other.host.close()
        check_that_nobody_has_a_state(fresh.line, quorum_of(fresh), 2.0)


def test_a_wait_for_a_long_step_is_said(
    lamp: Lamp, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(newcomer, "SAY_SECONDS", 0.3)
    caplog.set_level(logging.INFO)
    with both(lamp) as (busy, _):
        busy.host.is_busy = True
        threading.Timer(1.0, setattr, (busy.host, "is_busy", False)).start()
        started = time.monotonic()
        wait_for_steps([busy.me], 2.0)
        assert time.monotonic() - started < 5.0
    assert "waiting for" in caplog.text
    assert "rank 1 " in caplog.text
