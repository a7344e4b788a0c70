"""One rank's life against a real coordinator, where it meets what a plain run does not.

Compared with: theta and state of the coordinator. Run alone: pytest tests/worker/test_loop.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from chaos.lives import Life
from prometheus_client import CollectorRegistry
from support.certs import Certs
from support.live import Coordinator, Member, coordinating, eventually
from support.runs import config_of

from coordinator.store import Store
from loco.chain import Entry
from loco.config import Config, config_from_json
from loco.errors import LocoError
from loco.inner.groups import Group
from loco.metrics import Catalogue, WireMetrics
from loco.model import build_model, layout_of, pack
from loco.wire.v1 import coordinator_pb2 as pb
from worker.exchange import Exchange
from worker.loop import Worker
from worker.options import Options
from worker.session import Session
from worker.site import Site


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCO_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text("how vexingly quick daft zebras jump. " * 300)
    return path


def tiny(corpus: Path, **sections: dict[str, Any]) -> Config:
    small = {"dim": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 32}
    return config_of(
        model={**small, "seq_len": 16},
        data={"corpus": str(corpus), "batch": 4},
        inner={"steps": 2, "optimizer": "sgd", "lr": 0.1, "warmup_steps": 0},
        eval={"sequences": 4},
        **sections,
    )


@contextlib.contextmanager
def run_of(config: Config, directory: Path, certs: Certs | None = None) -> Iterator[Coordinator]:
    model = build_model(config.model, seed=0)
    layout = layout_of(model)
    theta = pack(model, layout)
    store = Store.create(directory, run_id="test", config=config, layout=layout, theta=theta)
    with coordinating(store, certs) as coordinator:
        yield coordinator


@contextlib.contextmanager
def worker_of(coordinator: Coordinator) -> Iterator[Worker]:
    options = Options(
        coordinator=coordinator.address,
        site="paris",
        data=None,
        device="cpu",
        patience_seconds=30.0,
        threads=1,
        metrics=None,
        checkpoint=None,
        checkpoint_every_rounds=10,
        link_mbit=None,
        bundle=coordinator.certs.bundle("paris") if coordinator.certs else None,
    )
    wire = WireMetrics(Catalogue(CollectorRegistry()))
    session = Session(coordinator.address, "paris", 30.0, wire, options.access)
    worker = Worker(options, Site(torch.device("cpu"), Group()), session)
    try:
        yield worker
    finally:
        worker._pulse.stop()
        session.close()


def enter(worker: Worker) -> pb.WaitRoundResponse:
    """What `Worker.run` does before its rounds; returns the first directive."""
    worker._run = worker._get_run()
    worker._config = config_from_json(worker._run.config_json)
    worker._trainer = worker._make_trainer()
    worker._layout = layout_of(worker._trainer.model)
    worker._exchange = Exchange(worker._config, worker._site, worker._trainer.model, worker._layout)
    worker._checkpoints = None
    return worker._enter()


def test_a_whole_run_of_one_rank(tmp_path: Path, corpus: Path) -> None:
    config = tiny(corpus, run={"rounds": 3}, quorum={"min_sites": 1})
    with run_of(config, tmp_path / "state") as coordinator, worker_of(coordinator) as worker:
        worker.run()
        state = coordinator.state
        assert (state.round, state.phase, state.sites["paris"].status) == (3, "finished", "left")
        assert worker._at.theta_digest == state.theta_digest
        assert worker._trainer.data_cursor == 6


@pytest.mark.parametrize("kind", ["update", "snapshot"])
def test_history_that_is_not_what_was_signed_ends_the_site(
    tmp_path: Path, corpus: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever answers in the coordinator's place has its word for other bytes only."""
    config = tiny(corpus, run={"rounds": 2}, quorum={"min_sites": 1})
    certs = Certs(tmp_path / "certs")
    with run_of(config, tmp_path / "state", certs) as coordinator, worker_of(coordinator) as worker:
        chain = coordinator.running.engine.chain
        honest = chain.get

        def other(asked: str, round_: int) -> Entry | None:
            entry = honest(asked, round_)
            if entry is None or asked != kind:
                return entry
            fact = replace(entry.fact, sha256="ab" * 32, theta_digest="cd" * 32)
            return chain._signed(Entry(body=fact.to_json(), previous=entry.previous))

        monkeypatch.setattr(chain, "get", other)
        with pytest.raises(LocoError, match=f"the {kind} of round 0 is not what the coordinator"):
            worker.run()
        held = worker._exchange.round
    assert held == 0


def test_a_site_dials_out_and_listens_nowhere(tmp_path: Path, corpus: Path) -> None:
    """Behind NAT nobody could reach it: there is no address of a site that could be wrong."""
    config = tiny(corpus, run={"rounds": 3}, quorum={"min_sites": 1})
    seen: list[set[tuple[str, int]]] = []

    def look(what: str, _round: int) -> bool:
        if what in ("after push", "asks"):
            seen.append(listening())
        return False

    with run_of(config, tmp_path / "state") as coordinator:
        before = listening()  # the coordinator lives in this process, too
        Life(coordinator.address, "paris", is_over=look).finishes()
    assert int(coordinator.address.rpartition(":")[2]) in {port for _, port in before}
    assert len(seen) >= 2 * 3
    assert all(ports == before for ports in seen)


def listening() -> set[tuple[str, int]]:
    """Addresses at which this process takes connections."""
    connections = psutil.Process().net_connections("inet")
    return {tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}


def test_asked_twice_in_one_round_it_sends_the_same_shard(tmp_path: Path, corpus: Path) -> None:
    """The coordinator lost sight of the site between the shards of its ranks."""
    config = tiny(corpus, run={"rounds": 3}, quorum={"min_sites": 2})
    with run_of(config, tmp_path / "state") as coordinator, worker_of(coordinator) as worker:
        worker._follow(enter(worker))
        with Member(coordinator, "oslo") as oslo:
            oslo.enter()
        directive = worker._next_directive()
        assert directive.directive == pb.DIRECTIVE_TRAIN
        worker._follow(directive)
        ef, steps = worker._exchange._ef.copy(), worker._trainer.data_cursor
        worker._follow(directive)
        assert worker._trainer.data_cursor == steps == 2
        assert np.array_equal(worker._exchange._ef, ef)
        assert coordinator.state.complete == ("paris",)


def test_a_snapshot_that_is_gone_is_asked_for_anew(tmp_path: Path, corpus: Path) -> None:
    config = tiny(corpus, run={"rounds": 0}, quorum={"min_sites": 1})
    with run_of(config, tmp_path / "state") as coordinator, worker_of(coordinator) as worker:
        enter(worker)
        gone = pb.WaitRoundResponse(directive=pb.DIRECTIVE_RESYNC, snapshot_round=77)
        worker._rounds(gone)
        assert worker._at.theta_digest == coordinator.state.theta_digest


def test_a_snapshot_with_another_digest_ends_the_site_with_words(
    tmp_path: Path, corpus: Path
) -> None:
    """Not RESYNC for ever: the coordinator's own file is wrong."""
    config = tiny(corpus, run={"rounds": 1}, quorum={"min_sites": 1})
    with run_of(config, tmp_path / "state") as coordinator, worker_of(coordinator) as worker:
        enter(worker)
        with pytest.raises(LocoError, match="snapshot of round 0 has digest"):
            worker._load_snapshot(0, "0" * 64)


def test_theta_that_went_astray_is_repaired_from_the_snapshot(tmp_path: Path, corpus: Path) -> None:
    config = tiny(corpus, run={"rounds": 2}, quorum={"min_sites": 1})
    with run_of(config, tmp_path / "state") as coordinator, worker_of(coordinator) as worker:
        worker._follow(enter(worker))
        worker._exchange._theta[7] += 1.0
        worker._report_theta("")
        worker._rounds(worker._next_directive())
        eventually(lambda: coordinator.state.phase == "finished", "the run is finished")
        assert worker._at.theta_digest == coordinator.state.theta_digest
        assert coordinator.metric("loco_digest_mismatches_total", site="paris") == 1
