"""Heartbeats that lie: the documents, metrics and plots of everyone else bear them.

Compared with: the same heartbeat without what cannot be. Run alone:
pytest tests/coordinator/test_beats.py
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from support.live import Member, coordinating
from support.runs import config_of, create_store

from coordinator.beats import MOST_ENTRIES, plain
from loco.wire.v1 import coordinator_pb2 as pb

CONFIG = config_of(quorum={"min_sites": 2})


def sound() -> pb.HeartbeatRequest:
    beat = pb.HeartbeatRequest(phase=pb.SITE_PHASE_PUSH, inner_steps=5, theta_digest="ab" * 32)
    beat.train_bits_per_byte = 2.5
    beat.phase_seconds.add(phase=pb.SITE_PHASE_PUSH, seconds=1.5)
    beat.spans.add(phase=pb.SITE_PHASE_COMPUTE, round=3, ended_ago_seconds=0.5, seconds=2.0)
    beat.reports.add(round=3, train_bits_per_byte=2.0, ef_norm=1.0, grad_norm=0.0)
    beat.evaluations.add(round=3, bits_per_byte=2.0)
    beat.totals.retries = 4
    return beat


def test_a_sound_beat_is_left_as_it_is() -> None:
    assert plain(sound()) == sound()


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, -1.0, 1e300])
def test_impossible_numbers_are_left_out(wrong: float) -> None:
    beat = sound()
    beat.train_bits_per_byte = wrong
    beat.link_bytes_per_second = wrong
    beat.phase_seconds.add(phase=pb.SITE_PHASE_WAIT, seconds=wrong)
    beat.spans.add(phase=pb.SITE_PHASE_WAIT, seconds=wrong)
    beat.reports.add(round=4, ef_norm=wrong)
    beat.evaluations.add(round=4, bits_per_byte=wrong)
    expected = sound()
    expected.ClearField("train_bits_per_byte")
    assert plain(beat) == expected


def test_unknown_phases_long_texts_and_huge_counts_are_left_out() -> None:
    beat = sound()
    beat.phase = 99
    beat.theta_digest = "x" * 65
    beat.inner_steps = 2**60
    beat.totals.retries = 2**63
    beat.phase_seconds.add(phase=-7, seconds=1.0)
    beat.spans.add(seconds=1.0)
    beat.spans.add(phase=pb.SITE_PHASE_WAIT, round=2**64 - 1, seconds=1.0)
    expected = sound()
    for name in ("phase", "theta_digest", "inner_steps", "totals"):
        expected.ClearField(name)
    assert plain(beat) == expected


def test_lists_have_an_end() -> None:
    beat = sound()
    for round_ in range(MOST_ENTRIES + 5):
        beat.evaluations.add(round=round_, bits_per_byte=1.0)
    kept = plain(beat).evaluations
    assert len(kept) == MOST_ENTRIES
    assert kept[-1].round == MOST_ENTRIES + 4


def test_a_lying_member_spoils_nothing_for_the_others(tmp_path: Path) -> None:
    """Status document, history and metrics stay readable, and housekeeping goes on."""
    with (
        coordinating(create_store(tmp_path, CONFIG)) as coordinator,
        Member(coordinator, "paris") as paris,
    ):
        paris.enter()
        paris.beat(
            phase=77,
            train_bits_per_byte=math.inf,
            phase_seconds=[pb.PhaseSeconds(phase=88, seconds=math.nan)],
            spans=[pb.PhaseSpan(seconds=math.inf, round=2**64 - 1)],
            reports=[pb.RoundReport(round=0, train_bits_per_byte=math.nan, ef_norm=-math.inf)],
            evaluations=[pb.Evaluation(round=0, bits_per_byte=math.inf)],
            totals=pb.SiteTotals(retries=2**64 - 1),
        )
        monitor, state = coordinator.running.monitor, coordinator.state
        json.dumps(monitor.status(state), allow_nan=False)
        json.dumps(monitor.history.document(0), allow_nan=False)
        json.dumps(monitor.timeline(0.0), allow_nan=False)
        assert monitor.history.take_unwritten() == []
