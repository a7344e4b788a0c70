"""A meeting between members that are slow, astray, dead or too few, over real sockets.

Compared with: who may go on, and in what time. Run alone: pytest tests/worker/elastic/test_host.py
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import pytest
import torch

from worker.elastic.host import Host, Rules, answers, dial, is_busy, listens
from worker.elastic.meeting import Hello, Standing
from worker.elastic.quorum import Member
from worker.elastic.wire import receive_frame, receive_tensor, send_frame

RULES = Rules(target_size=2, start_seconds=5.0, heal_seconds=1.0)
OLD = [Standing(version=7, label="g", rank=rank, size=2, backup_of=-1) for rank in range(2)]


@contextlib.contextmanager
def hosting() -> Iterator[tuple[Host, list[Member]]]:
    """A host, and two members, of whom the first is the host's."""
    host = Host("127.0.0.1", RULES)
    others = Host("127.0.0.1", RULES)
    try:
        yield host, [Member.new(0, host.address), Member.new(1, others.address)]
    finally:
        host.close()
        others.close()


class Guest:
    """A member that says exactly what a test wants it to say."""

    def __init__(self, me: Member, members: list[Member], now: Standing | None) -> None:
        self.me = me
        self._connection = dial(members[0], 15.0)
        hello = Hello(
            id=me.id, store="s:1", now=now, staged=None, waiting_seconds=0.0, prepared=True
        )
        ids = [member.id for member in members]
        message = {"kind": "hello", "number": 1, "members": ids, "hello": asdict(hello)}
        send_frame(self._connection, message)

    def answer(self) -> dict[str, Any]:
        return receive_frame(self._connection)

    def ready(self, digest: str) -> None:
        send_frame(self._connection, {"digest": digest, "failure": "", "healed": 5})

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def verdict(guest: Guest, digest: str) -> dict[str, Any]:
    """Take the plan, be ready, and hear how it ended."""
    assert "plan" in guest.answer()
    guest.ready(digest)
    found: dict[str, Any] = guest.answer()["verdict"]
    return found


def test_a_new_member_that_takes_too_long_is_left_out_and_the_old_one_goes_on() -> None:
    """torchft's healing ends the healthy source, and leaves the joiner alone on random weights."""
    with (
        hosting() as (_, members),
        Guest(members[0], members, OLD[0]) as old,
        Guest(members[1], members, None) as new,
    ):
        started = time.monotonic()
        heal = new.answer()["plan"]["heal"]
        found = verdict(old, "d")
        assert time.monotonic() - started < RULES.heal_seconds + 1.0
        assert heal == {members[1].id: members[0].id}
        assert found["order"] == [members[0].id]
        new.ready("d")  # too late, though right
        assert new.answer()["verdict"]["order"] == [members[0].id]


def test_a_new_member_with_another_digest_is_in_no_group() -> None:
    with (
        hosting() as (_, members),
        ThreadPoolExecutor(2) as threads,
        Guest(members[0], members, OLD[0]) as old,
        Guest(members[1], members, None) as new,
    ):
        told: Future[dict[str, Any]] = threads.submit(verdict, new, "other")
        assert verdict(old, "d")["order"] == [members[0].id]
        assert told.result()["order"] == [members[0].id]


def test_a_new_member_with_the_right_digest_comes_last_and_its_bytes_are_told() -> None:
    with (
        hosting() as (_, members),
        ThreadPoolExecutor(2) as threads,
        Guest(members[0], members, None) as new,
        Guest(members[1], members, OLD[0]) as old,
    ):
        told = threads.submit(verdict, new, "d")
        found = verdict(old, "d")
        assert found == told.result()
        assert found["order"] == [members[1].id, members[0].id]
        assert found["healed_bytes"] == 10


def test_an_old_member_whose_state_went_astray_is_named_and_all_meet_again() -> None:
    """Replicas that must be equal and are not: the first of two equally many counts."""
    with (
        hosting() as (_, members),
        ThreadPoolExecutor(2) as threads,
        Guest(members[0], members, OLD[0]) as a,
        Guest(members[1], members, OLD[1]) as b,
    ):
        told = threads.submit(verdict, a, "d")
        found = verdict(b, "flipped")
        assert found == told.result()
        assert found["out"] == [members[1].id]
        assert "rank 1" in found["again"]


def test_a_member_that_died_before_the_meeting_ends_it_at_once() -> None:
    with hosting() as (_, members):
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        members[1] = Member.new(1, f"127.0.0.1:{port}")
        started = time.monotonic()
        with Guest(members[0], members, OLD[0]) as old:
            assert "is gone" in old.answer()["verdict"]["again"]
        assert time.monotonic() - started < 5.0


def test_a_rank_alone_without_state_does_not_begin_the_site() -> None:
    """It may be that the others live and a new lighthouse does not know them yet."""
    with hosting() as (_, members), Guest(members[0], members[:1], None) as alone:
        assert "1 of 2 ranks are here" in alone.answer()["verdict"]["again"]


def test_a_state_is_given_only_while_it_is_settled() -> None:
    with hosting() as (host, members), dial(members[0], 5.0) as peer:
        send_frame(peer, {"kind": "state", "known": {}})
        assert "refused" in receive_frame(peer)
        tensor = torch.arange(7.0)
        host.source = lambda: ({"about": 1}, {"x": tensor})
        send_frame(peer, {"kind": "state", "known": {}})
        assert receive_frame(peer) == {"about": 1}
        into = torch.empty(7)
        receive_tensor(peer, into, "x")
        assert torch.equal(into, tensor)


def test_a_member_that_trains_gives_what_lasts_and_says_that_it_is_busy() -> None:
    """No state is settled meanwhile, so a joiner cannot take it; what lasts it can."""
    with hosting() as (host, members), dial(members[0], 5.0) as peer:
        host.is_busy, host.beside = True, lambda: ({"about": 2}, {"theta": torch.ones(3)})
        send_frame(peer, {"kind": "state", "known": {}})
        assert "refused" in receive_frame(peer)
        send_frame(peer, {"kind": "beside"})
        assert receive_frame(peer) == {"about": 2}
        into = torch.empty(3)
        assert receive_tensor(peer, into, "theta") == 12
        assert torch.equal(into, torch.ones(3))
        assert is_busy(members[0], 5.0)
        assert not is_busy(members[1], 5.0)


def test_a_live_member_answers_and_a_dead_one_does_not() -> None:
    with hosting() as (_, members):
        assert answers(members[1], 5.0)
    assert not answers(members[1], 1.0)
    assert not listens(members[1])


def test_what_nobody_understands_ends_the_conversation_and_not_the_member(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with hosting() as (_, members):
        with dial(members[0], 5.0) as peer:
            send_frame(peer, {"kind": "dance"})
            with pytest.raises(ConnectionError):
                receive_frame(peer)
        assert answers(members[0], 5.0)
