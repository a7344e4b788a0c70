"""The page's documents for a run of 1,000 rounds and 64 sites: their size and their bounds.

The run is played through the real round machine and the real Monitor, without sites.
    pytest tests/coordinator/test_web_scale.py
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from support.play import Play, playing
from support.runs import config_of, create_store

from coordinator.history import MAX_ROUNDS, RUN
from coordinator.monitor import Monitor
from coordinator.store import Store
from loco.wire.protocol import phase_name
from loco.wire.v1 import coordinator_pb2 as pb

SITES = [f"site-{i:02d}" for i in range(64)]
_PHASES = (
    (pb.SITE_PHASE_COMPUTE, 20.0),
    (pb.SITE_PHASE_ENCODE, 0.4),
    (pb.SITE_PHASE_PUSH, 3.0),
    (pb.SITE_PHASE_WAIT, 5.0),
    (pb.SITE_PHASE_PULL, 1.2),
    (pb.SITE_PHASE_APPLY, 0.4),
)
ROUND_SECONDS = sum(seconds for _, seconds in _PHASES)
PLAYED_ROUNDS = 10


@contextlib.contextmanager
def long_run(directory: Path, rounds: int, sites: list[str] = SITES) -> Iterator[Play]:
    """A run after so many rounds. The last ones are played; those before are only remembered."""
    config = config_of(run={"rounds": rounds + 500}, quorum={"min_sites": len(sites)})
    rng = np.random.default_rng(0)
    first = max(0, rounds - PLAYED_ROUNDS)
    with playing(create_store(directory, config), first) as play:
        play.now += first * ROUND_SECONDS
        _remember(play, first, sites)
        for site in sites:
            play.join(site)
        for round_ in range(first, rounds):
            play.now += ROUND_SECONDS
            for i, site in enumerate(sites):
                play.push(site, size_bytes=int(rng.integers(9_000, 11_000)))
                _report(play, site, round_, round_ - first, _loss(round_, i))
        yield play


def _loss(round_: int, site: int) -> float:
    return 1.5 + 4 * math.exp(-round_ / 150) + 0.002 * site


def _remember(play: Play, rounds: int, sites: list[str]) -> None:
    rng, history = np.random.default_rng(1), play.monitor.history
    for round_ in range(rounds):
        committed = play.now - (rounds - round_) * ROUND_SECONDS
        history.reach(round_)
        history.tell(
            RUN, round_, committed_at=committed, update_bytes=int(rng.integers(2900, 3100))
        )
        for i, site in enumerate(sites):
            history.tell(
                site,
                round_,
                train_bits_per_byte=_loss(round_, i) + rng.normal(0, 0.02),
                contribution_bytes=int(rng.integers(9_000, 11_000)),
                ef_norm=rng.normal(5, 0.1),
                **{phase_name(phase): s * rng.uniform(0.9, 1.1) for phase, s in _PHASES},
            )


def _report(play: Play, site: str, round_: int, earlier: int, loss: float) -> None:
    ago, spans = 0.0, []
    for phase, seconds in reversed(_PHASES):
        spans.append(
            pb.PhaseSpan(phase=phase, round=round_, ended_ago_seconds=ago, seconds=seconds)
        )
        ago += seconds
    play.beat(
        site,
        phase=pb.SITE_PHASE_COMPUTE,
        round=round_ + 1,
        spans=reversed(spans),
        num_earlier_spans=earlier * len(_PHASES),
        reports=[pb.RoundReport(round=round_, train_bits_per_byte=loss, ef_norm=1.0)],
        train_bits_per_byte=loss,
        evaluations=[pb.Evaluation(round=round_, bits_per_byte=loss + 0.05)],
    )


def test_documents_stay_bounded(tmp_path: Path) -> None:
    rounds = MAX_ROUNDS + 20
    with long_run(tmp_path, rounds) as play:
        history = play.monitor.history.document(0)
        news = play.monitor.history.document(rounds - 3)
        timeline = play.monitor.timeline(play.now - 60)
        status = play.monitor.status(play.state)
    assert history["first_round"] == rounds - MAX_ROUNDS + 1
    assert history["num_rounds"] == MAX_ROUNDS
    assert len(history["sites"]) == len(SITES)
    assert len(gzip.compress(_dumps(history))) < 1_000_000
    # What the page asks for every two seconds:
    assert len(_dumps(news)) + len(_dumps(timeline)) + len(_dumps(status)) < 200_000


def test_what_sites_told_survives_a_restart(tmp_path: Path) -> None:
    with long_run(tmp_path, 30, SITES[:3]) as play:
        before = play.monitor.history.document(0)
    after = Monitor(Store.open(tmp_path))
    assert after.history.document(0) == before
    asyncio.run(after.close())
    after.store.close()


def _dumps(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
