"""Heartbeats: all that was measured arrives, whatever the interval, and once.

Compared with: the status document of a real coordinator. Run alone:
pytest tests/worker/test_pulse.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from support.live import Coordinator, Member, coordinating, eventually
from support.runs import LAYOUT, config_of, create_store, vector

from coordinator.store import Store
from loco.metrics import Catalogue, WireMetrics
from loco.wire.access import Access
from loco.wire.v1 import coordinator_pb2 as pb
from worker.pulse import Pulse

CONFIG = config_of(quorum={"min_sites": 1}, run={"rounds": 10})
EVALUATIONS = {0: 8.0, 1: 7.0, 2: 6.0}


def train_two_rounds(coordinator: Coordinator, paris: Member) -> None:
    paris.enter()
    for round_ in range(2):
        paris.contribute(round_, vector(LAYOUT, round_))
        eventually(lambda: coordinator.state.round == round_ + 1, "the round is committed")  # noqa: B023


def evaluate(pulse: Pulse) -> None:
    for round_, value in EVALUATIONS.items():
        with pulse.edit() as beat:
            beat.evaluations.add(round=round_, bits_per_byte=value)


def measured(coordinator: Coordinator) -> dict[int, float]:
    status = coordinator.running.monitor.status(coordinator.state)
    return {entry["round"]: entry["bits_per_byte"] for entry in status["validation"]}


def test_every_evaluation_between_two_beats_arrives(tmp_path: Path) -> None:
    """The rounds of a small model are shorter than a heartbeat's interval."""
    store = create_store(tmp_path, CONFIG)
    with coordinating(store) as coordinator, Member(coordinator, "paris") as paris:
        train_two_rounds(coordinator, paris)
        pulse = Pulse()
        wire = WireMetrics(Catalogue(CollectorRegistry()))
        pulse.start(coordinator.address, Access(), paris.caller, 3600.0, wire)
        evaluate(pulse)
        pulse.stop()
        assert measured(coordinator) == EVALUATIONS


def test_what_was_measured_while_the_coordinator_was_away_arrives_later(tmp_path: Path) -> None:
    coordinator = Coordinator(create_store(tmp_path, CONFIG))
    with Member(coordinator, "paris") as paris:
        train_two_rounds(coordinator, paris)
        address = coordinator.address
        coordinator.stop()
        pulse = Pulse()
        wire = WireMetrics(Catalogue(CollectorRegistry()))
        pulse.start(address, Access(), paris.caller, 0.1, wire)
        evaluate(pulse)
        again = Coordinator(Store.open(tmp_path), listen=address)
        try:
            eventually(lambda: measured(again) == EVALUATIONS, "all evaluations are there")
            eventually(lambda: not pulse._snapshot().evaluations, "none is sent again")
        finally:
            pulse.stop()
            again.stop()


def test_an_answered_beat_takes_away_only_what_it_carried() -> None:
    pulse = Pulse()
    evaluate(pulse)
    sent = pulse._snapshot()
    with pulse.edit() as beat:
        beat.evaluations.add(round=3)
    pulse._answered(sent)
    assert [e.round for e in pulse._snapshot().evaluations] == [3]


@pytest.mark.parametrize("kind", ["evaluations", "reports"])
def test_what_nobody_hears_is_bounded(kind: str) -> None:
    pulse = Pulse()
    for round_ in range(1500):
        with pulse.edit() as beat:
            getattr(beat, kind).add(round=round_)
    kept = [entry.round for entry in getattr(pulse._snapshot(), kind)]
    assert kept == list(range(500, 1500))


def test_time_is_accounted_to_the_phase_it_was_spent_in() -> None:
    pulse = Pulse()
    with pulse.phase(pb.SITE_PHASE_COMPUTE):
        with pulse.phase(pb.SITE_PHASE_EVAL):
            pass
        inside = pulse._snapshot()
    assert inside.phase == pb.SITE_PHASE_COMPUTE
    after = pulse._snapshot()
    assert after.phase == pb.SITE_PHASE_SYNC
    spent = {entry.phase for entry in after.phase_seconds}
    assert spent == {pb.SITE_PHASE_SYNC, pb.SITE_PHASE_COMPUTE, pb.SITE_PHASE_EVAL}
