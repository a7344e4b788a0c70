"""Who is there, asked of a real lighthouse: away, forgetful, or full of strangers.

Compared with: the traps of docs/torchft.md. Run alone: pytest tests/worker/elastic/test_quorum.py
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.lamp import Lamp

from loco.errors import ConfigError, UnreachableError
from worker.elastic.quorum import Lighthouse, Member, Quorum

os.environ["RUST_LOG"] = "error"  # read when torchft is imported
pytest.importorskip("torchft", reason="torchft has no wheel for this machine")


@pytest.fixture
def lamp() -> Iterator[Lamp]:
    lamp = Lamp()
    yield lamp
    lamp.put_out()


def members(lamp: Lamp, *slots: int, patience_seconds: float = 60.0) -> list[Lighthouse]:
    return [
        Lighthouse(
            lamp.address, Member.new(slot, f"127.0.0.1:{slot}"), patience_seconds=patience_seconds
        )
        for slot in slots
    ]


def ask(line: Lighthouse, size: int) -> Quorum:
    """Ask until so many are there: who comes first to a new lighthouse may be there alone."""
    while len((quorum := line.ask(0, anew=False)).members) < size:
        pass
    return quorum


def all_ask(lines: list[Lighthouse]) -> list[Quorum]:
    with ThreadPoolExecutor(len(lines)) as threads:
        return list(threads.map(lambda line: ask(line, len(lines)), lines))


def slots(quorum: Quorum) -> list[int]:
    return [member.slot for member in quorum.members]


def close(lines: list[Lighthouse]) -> None:
    for line in lines:
        line.close()


def test_a_lighthouse_that_was_away_is_asked_again_and_nobody_is_poisoned(lamp: Lamp) -> None:
    """torchft's Manager raises for ever after one time-out; a restart of 4 s ended both ranks."""
    lamp.light()
    lines = members(lamp, 0, 1)
    before = all_ask(lines)
    lamp.put_out()
    with ThreadPoolExecutor(2) as threads:
        asking = [threads.submit(ask, line, 2) for line in lines]
        time.sleep(4.0)
        assert not any(future.done() for future in asking)
        lamp.light()
        began = time.monotonic()
        after = [future.result(60.0) for future in asking]
    assert time.monotonic() - began < 15.0
    assert [slots(quorum) for quorum in (*before, *after)] == [[0, 1]] * 4
    close(lines)


def test_a_restarted_lighthouse_counts_from_the_beginning_again(lamp: Lamp) -> None:
    """The trap itself: one number names two quorums, so that nothing of ours is named by it."""
    found = []
    for slot in (0, 1):
        lamp.light()
        (line,) = members(lamp, slot)
        found.append(line.ask(0, anew=False))
        line.close()
        lamp.put_out()
    assert found[0].number == found[1].number, "then torchft has changed: read docs/torchft.md"
    assert found[0] != found[1]


def test_a_lighthouse_that_does_not_come_is_said_after_the_patience(lamp: Lamp) -> None:
    (line,) = members(lamp, 0, patience_seconds=1.0)
    with pytest.raises(UnreachableError, match=r"did not answer for .* check that it runs"):
        line.ask(0, anew=False)
    line.close()


def test_the_answer_of_one_step_is_the_same_for_all_and_waits_beside_it(lamp: Lamp) -> None:
    """Whoever asks in a step learns of a newcomer, all alike, when the next one begins."""
    lamp.light()
    lines = members(lamp, 0, 1)
    before = all_ask(lines)
    (third,) = members(lamp, 2)
    with ThreadPoolExecutor(1) as threads:
        newcomer = threads.submit(ask, third, 3)
        answers: list[Quorum | None] = [None, None]
        until = time.monotonic() + 30.0
        while answers == [None, None] or slots(answers[0] or before[0]) == [0, 1]:
            assert time.monotonic() < until
            for line in lines:
                line.ask_beside(0)
            answers = [line.answer() for line in lines]  # the newcomer dials meanwhile
        assert answers[0] == answers[1] == newcomer.result(5.0)
    assert slots(newcomer.result()) == [0, 1, 2]
    assert [line.answer() for line in lines] == [None, None], "an answer is given once"
    close([*lines, third])


def test_an_answer_is_not_lost_because_it_took_long(lamp: Lamp) -> None:
    """A call given up just before its answer left one rank asking and the others at the meeting."""
    lamp.light()
    lines = members(lamp, 0, 1)
    all_ask(lines)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(lines[0].ask, 1, anew=False)
        time.sleep(4.5)  # heartbeats go on, so the other is waited for
        assert not first.done()
        second = lines[1].ask(1, anew=False)
        assert first.result(1.0) == second
    close(lines)


def test_everyone_who_lives_or_lived_is_known_whoever_asked(lamp: Lamp) -> None:
    """A quorum leaves out who does not ask; torchft's own page names all, by their heartbeats."""
    lamp.light()
    lines = members(lamp, 0, 1, 2)
    quorum = all_ask(lines[:2])[0]
    with pytest.raises(OSError, match="does not name this rank"):
        lines[2].everyone()
    lines[0].close()
    assert lines[1].everyone() == list(quorum.members)
    lamp.put_out()
    with pytest.raises(OSError, match=r"refused|reset"):
        lines[1].everyone()
    close(lines)


def test_how_long_a_lighthouse_knows_a_member_begins_anew_with_its_life(lamp: Lamp) -> None:
    """What a new one does not know yet, it may learn within a heartbeat: nothing is begun on it."""
    lamp.light()
    (line,) = members(lamp, 0)
    assert line.known_seconds == 0.0
    line.ask(0, anew=False)
    time.sleep(1.0)
    assert line.known_seconds >= 1.0
    lamp.put_out()
    lamp.light()
    lit = time.monotonic()
    line.ask(0, anew=False)  # the answer may still be of the line that died
    line.ask(0, anew=False)
    assert 0.0 < line.known_seconds < time.monotonic() - lit
    close([line])


def test_ids_sort_by_slot_also_as_text_and_a_stranger_is_named() -> None:
    """torchft sorts ids as text: replica_10 before replica_2."""
    several = [Member.new(slot, "10.0.0.1:7") for slot in (2, 10, 100)]
    assert sorted(member.id for member in several) == [member.id for member in several]
    assert [Member.of(member.id) for member in several] == several
    with pytest.raises(ConfigError, match=r"'replica_0' is at this site's lighthouse"):
        Member.of("replica_0")
