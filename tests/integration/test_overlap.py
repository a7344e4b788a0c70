"""The exchange behind inner steps: what is applied when, and what an accident changes (nothing).

Compared with: a simulation in one process of the same equations, and undisturbed runs, in theta of
every round and in every bit. Run alone: pytest tests/integration/test_overlap.py
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chaos.lives import Killed, Life, at
from chaos.proxy import Proxy
from chaos.runs import exact_run
from support.cluster import Cluster
from support.live import Coordinator, coordinating, eventually

from benchmarks.simulation import Simulation
from coordinator.events import RoundCommitted, ShardStored
from coordinator.store import Store
from loco.config import Config
from loco.digest import chunk_hashes, theta_digest
from loco.layout import cells
from loco.model import build_model, layout_of, pack
from loco.wire.v1 import coordinator_pb2 as pb
from worker import lanes
from worker.trainer import Trainer

ROUNDS, H = 6, 3
SITES = {"oslo": "sotu:1960-2026", "paris": "sotu:1790-1860"}
KEPT = {"unsent": "replica", "beta": 0.0, "aggregation": "mean"}
MOMENTUM = KEPT | {"aggregation": "nesterov", "momentum": 0.5}
END = {"k_end": 2048, "k_end_rounds": 2}
ALPHA = 0.7
"""Not 1: a site alone would guess each update exactly, whenever it is applied."""
EMBED = {"tensors": ["embed_tokens.weight"], "k": 512, "bits": 1, "aggregation": "mean"}


def config_of_run(
    delay: int,
    *,
    sites: tuple[str, ...],
    fragments: int = 1,
    own: dict[str, Any] | None = None,
    outer: dict[str, Any] | None = None,
    codec: dict[str, Any] | None = None,
    **inner: Any,
) -> Config:
    raw = exact_run(seed=11, rounds=ROUNDS)
    raw["data"]["sites"] = {site: SITES[site] for site in sites}
    raw["inner"] |= {"steps": H, "max_local_steps": H, "warmup_steps": 2, **inner}
    raw["outer"] = {"delay_steps": delay, "fragments": fragments, "own_fragments": own or {}}
    raw["outer"] |= {"alpha": ALPHA, **(outer or {})}
    raw["codec"] |= codec or {}
    raw["quorum"]["min_sites"] = len(sites)
    return Config.model_validate(raw)


@contextlib.contextmanager
def run_of(directory: Path, config: Config) -> Iterator[Coordinator]:
    torch.set_num_threads(1)
    model = build_model(config.model, seed=config.run.seed)
    layout, theta = layout_of(model), pack(model, layout_of(model))
    with coordinating(
        Store.create(directory, run_id="overlap", config=config, layout=layout, theta=theta)
    ) as coordinator:
        yield coordinator


def digests(coordinator: Coordinator) -> list[str]:
    events = (event for _, event in coordinator.store.journal.replay(after=0))
    return [e.theta_digest for e in events if isinstance(e, RoundCommitted)]


def cursors(coordinator: Coordinator) -> list[int]:
    events = (event for _, event in coordinator.store.journal.replay(after=0))
    return [e.data_cursor for e in events if isinstance(e, ShardStored)]


def simulated(config: Config) -> list[str]:
    simulation = Simulation(config)
    digest = lambda: theta_digest(chunk_hashes(simulation.theta))  # noqa: E731
    return [digest() for _ in simulation.rounds()]


@pytest.mark.parametrize(
    ("delay", "fragments", "more"),
    [
        (0, 1, {}),
        (1, 1, {}),
        (H, 1, {"sync": "scape", "density": 0.25}),
        (0, 2, {"sync": "scape", "density": 0.25}),
        (2, 2, {}),
        (0, 4, {}),
        (1, 4, {"sync": "scape", "density": 0.25}),
        (0, 1, {"own": {"embed": EMBED}}),
        (2, 2, {"own": {"embed": EMBED, "norms": {"tensors": ["norm.weight"]}}}),
        (0, 1, {"outer": KEPT}),
        (2, 2, {"outer": KEPT, "codec": END}),
        (2, 2, {"outer": MOMENTUM}),
    ],
)
def test_two_sites_do_what_the_simulation_does(
    tmp_path: Path, delay: int, fragments: int, more: dict[str, Any]
) -> None:
    config = config_of_run(delay, sites=("oslo", "paris"), fragments=fragments, **more)
    with run_of(tmp_path / "state", config) as coordinator:
        lives = [Life(coordinator.address, site) for site in SITES]
        for life in lives:
            life.finishes()
        assert digests(coordinator) == simulated(config)
        assert sorted(cursors(coordinator)) == sorted(2 * [H * (r + 1) for r in range(ROUNDS)])


@pytest.mark.parametrize("delay", [0, 2])
def test_a_model_of_more_than_one_cell_too(tmp_path: Path, delay: int) -> None:
    """4.6 million elements, two payloads a contribution; what stands in theta is of both."""
    raw = config_of_run(delay, sites=("oslo", "paris"), outer=KEPT).model_dump()
    raw["model"] |= {"dim": 512, "num_heads": 8, "num_kv_heads": 2, "ffn_dim": 1024}
    raw["model"] |= {"num_layers": 2, "seq_len": 16}
    raw["data"]["batch"] = 1
    raw["run"]["rounds"] = 2
    config = Config.model_validate(raw)
    layout = layout_of(build_model(config.model, seed=0))
    assert [len(cell) for cell in cells(range(layout.num_chunks))] == [1024, 101]
    with run_of(tmp_path / "state", config) as coordinator:
        lives = [Life(coordinator.address, site) for site in SITES]
        for life in lives:
            life.finishes()
        assert digests(coordinator) == simulated(config)


@pytest.mark.parametrize(("delay", "bits"), [(2, 2), (H, 2), (H, 32)], ids=["2", "H", "dense"])
def test_inner_steps_go_on_while_a_contribution_is_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delay: int, bits: int
) -> None:
    """The upload is held up until the steps of the delay are made: else nothing would go on.

    And once it could begin they wait until it has: it does not wait for them either.
    """
    raw = config_of_run(delay, sites=("paris",), outer={"aggregation": "mean"}).model_dump()
    raw["codec"] |= {"bits": bits}
    begun, made = threading.Event(), []
    train = Trainer.train

    def wait_for_the_upload(trainer: Trainer, num_steps: int, plan: pb.RoundPlan) -> None:
        round_, at = life.worker._exchange.round, life.worker._at
        encoded = at.in_flight and at.pending is not None and at.pending.shards
        if round_ == 2 and encoded and num_steps:
            eventually(begun.is_set, "the upload has begun")
        train(trainer, num_steps, plan)

    def hold_up(what: str, round_: int) -> bool:
        if what == "before push" and round_ == 2:
            begun.set()
            trainer = life.worker._trainer
            eventually(lambda: trainer.local_steps == delay, "steps were made meanwhile")
            made.append(trainer.local_steps)
        return False

    monkeypatch.setattr(Trainer, "train", wait_for_the_upload)
    with run_of(tmp_path / "state", Config.model_validate(raw)) as coordinator:
        life = Life(coordinator.address, "paris", is_over=hold_up)
        life.finishes()
    assert made == [delay]


def test_a_delay_changes_theta_from_the_second_round_on() -> None:
    """Or the tests here would compare a thing with itself; fragments from the first one on."""
    blocking = simulated(config_of_run(0, sites=("paris",)))
    delayed = simulated(config_of_run(1, sites=("paris",)))
    parts = simulated(config_of_run(0, sites=("paris",), fragments=2))
    assert blocking[0] == delayed[0]
    assert all(a != b for a, b in zip(blocking[1:], delayed[1:], strict=True))
    assert all(a != b for a, b in zip(blocking, parts, strict=True))


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_site_alone_loses_nothing_to_a_longer_delay(fragments: int) -> None:
    """It goes on from where the update will lead: with nobody else's values that is the update."""

    def config(delay: int) -> Config:
        outer = {"alpha": 1.0}
        return config_of_run(delay, sites=("paris",), fragments=fragments, outer=outer)

    as_soon_as_encoded = simulated(config(1))
    assert [simulated(config(delay)) for delay in (2, H)] == [as_soon_as_encoded] * 2


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    return simulated(config_of_run(2, sites=("paris",), fragments=2))


@pytest.mark.parametrize("latency", [0.0, 0.15])
def test_the_speed_of_the_link_changes_nothing(
    tmp_path: Path, undisturbed: list[str], latency: float
) -> None:
    """The update is applied at its step, whether it came long before or is waited for."""
    config = config_of_run(2, sites=("paris",), fragments=2)
    with run_of(tmp_path / "state", config) as coordinator:
        host, port = coordinator.address.split(":")
        proxy = Proxy((host, int(port)))
        proxy.change(latency_seconds=latency)
        Life(proxy.address, "paris").finishes()
        proxy.close()
        assert digests(coordinator) == undisturbed


def test_in_how_many_parts_a_rank_uploads_changes_nothing(
    tmp_path: Path, undisturbed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "LANES", 2)
    monkeypatch.setattr(lanes, "LANE_BYTES", 400)
    config = config_of_run(2, sites=("paris",), fragments=2)
    with run_of(tmp_path / "state", config) as coordinator:
        Life(coordinator.address, "paris").finishes()
        assert digests(coordinator) == undisturbed
        events = [event for _, event in coordinator.store.journal.replay(after=0)]
        shards = {(e.shard, e.num_shards) for e in events if isinstance(e, ShardStored)}
        assert shards == {(shard, len(shards)) for shard in range(len(shards))}
        assert len(shards) > lanes.LANES  # so that one waits for another to have gone
        (status,) = coordinator.running.monitor.status(coordinator.state)["sites"]
        assert status["ranks"] == 1


def test_a_site_that_waits_needs_one_round_trip_a_round(tmp_path: Path) -> None:
    """It asks what comes next while its contribution is on its way."""
    rtt, pushes = 0.5, []

    def note(what: str, _round: int) -> bool:
        if what == "before push":
            pushes.append(time.monotonic())
        return False

    with run_of(tmp_path / "state", config_of_run(0, sites=("paris",))) as coordinator:
        host, port = coordinator.address.split(":")
        proxy = Proxy((host, int(port)))
        proxy.change(latency_seconds=rtt / 2)
        Life(proxy.address, "paris", is_over=note).finishes()
        proxy.close()
    assert rtt < min(b - a for a, b in itertools.pairwise(pushes)) < 2 * rtt


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(
    "moment", ["asks", "before push", "after push", "before pull", "after pull"]
)
def test_killed_and_back_from_a_checkpoint_nothing_differs_in_any_bit(
    tmp_path: Path, undisturbed: list[str], moment: str, every: int
) -> None:
    checkpoint = tmp_path / "checkpoint"
    config = config_of_run(2, sites=("paris",), fragments=2)
    with run_of(tmp_path / "state", config) as coordinator:
        first = Life(
            coordinator.address, "paris", checkpoint=checkpoint, every=every, is_over=at(moment, 3)
        )
        assert isinstance(first.ends(), Killed)
        Life(coordinator.address, "paris", checkpoint=checkpoint, every=every).finishes()
        assert digests(coordinator) == undisturbed
        assert cursors(coordinator) == [H * (r + 1) for r in range(ROUNDS)]


def test_theta_is_evaluated_without_the_progress_of_the_site(tmp_path: Path) -> None:
    raw = config_of_run(2, sites=("paris",), fragments=2).model_dump()
    config = Config.model_validate(raw | {"eval": {"every_rounds": 1, "sequences": 8}})
    with run_of(tmp_path / "state", config) as coordinator:
        Life(coordinator.address, "paris").finishes()
        status = coordinator.running.monitor.status(coordinator.state)
        measured = {m["round"]: m["bits_per_byte"] for m in status["validation"]}
    simulation = Simulation(config)
    wanted = {0: simulation.evaluate()}
    wanted |= {r.round + 1: simulation.evaluate() for r in simulation.rounds()}
    assert measured.keys() == wanted.keys()
    for round_, bits in measured.items():
        np.testing.assert_allclose(bits, wanted[round_], rtol=1e-6)


@pytest.mark.slow
def test_ranks_apply_at_the_same_step_and_may_change_at_a_restart(tmp_path: Path) -> None:
    """Two ranks, then one, then two: all that was trained is counted once, theta is everyone's."""
    rounds, batch, seq_len = 24, 4, 32
    keep = ("--checkpoint", str(tmp_path / "ck"), "--checkpoint-every-rounds", "1")
    with Cluster(
        tmp_path,
        run={"rounds": rounds},
        quorum={"min_sites": 1},
        inner={"sync": "scape", "steps": H, "max_local_steps": H},
        outer={"delay_steps": 2, "fragments": 2},
    ) as cluster:
        cluster.coordinator()
        for ranks, until in ((2, 5), (1, 11)):
            site = cluster.site("paris", *keep, ranks=ranks, log=f"ranks-{ranks}-{until}")
            cluster.reaches(until)
            site.interrupt()
            assert site.wait(30) == 130, site.output
        last = cluster.site("paris", *keep, ranks=2, log="last")
        status = cluster.finish(last)
    assert "going on from the checkpoint" in last.output
    (site_status,) = status["sites"]
    assert site_status["theta_digest"] == status["theta_digest"]
    assert site_status["tokens"] == rounds * H * batch * seq_len
