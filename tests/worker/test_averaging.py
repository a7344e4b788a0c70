"""What loco must equal when nothing is compressed: plain averaging, and local training.

Compared with: float64 averages of the sites' parameters, and a model that trains alone. Real
trainers, exchanges and the outer step; only the wire is left out. Run alone:
pytest tests/worker/test_averaging.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.contributing import contribute
from support.runs import Array, config_of

from loco.config import Config
from loco.inner.groups import Group
from loco.layout import Layout
from loco.model import layout_of, pack
from loco.outer import OuterRules, Piece, outer_step
from loco.wire.v1 import coordinator_pb2 as pb
from worker.exchange import Exchange
from worker.site import Site
from worker.trainer import Trainer

WEIGHTS = {"paris": 0.75, "oslo": 0.25}


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCO_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return path


def config(corpus: Path, **inner: object) -> Config:
    return config_of(
        model={
            "dim": 16,
            "num_layers": 1,
            "num_heads": 2,
            "num_kv_heads": 1,
            "ffn_dim": 32,
            "seq_len": 16,
        },
        data={"corpus": str(corpus), "batch": 4},
        inner={"warmup_steps": 0, "min_lr_fraction": 1.0, **inner},
        codec={"bits": 32},
        outer={"aggregation": "mean", "alpha": 1.0, "beta": 0.5},
        eval={"sequences": 4},
    )


class OneRankSite:
    """A site of one rank: trainer and exchange, as `worker.loop` holds them."""

    def __init__(self, given: Config, name: str, theta: Array | None = None) -> None:
        site = Site(torch.device("cpu"), Group())
        self.trainer = Trainer(given, site, name, given.data.corpus)
        self.layout: Layout = layout_of(self.trainer.model)
        self.exchange = Exchange(given, site, self.trainer.model, self.layout)
        start = pack(self.trainer.model, self.layout) if theta is None else theta
        self.exchange.load(start.tobytes(), 0)
        self.exchange.write_parameters()
        self.steps = given.inner.steps

    @property
    def parameters(self) -> Array:
        return pack(self.trainer.model, self.layout)

    def train(self, round_: int, rounds: int) -> bytes:
        plan = pb.RoundPlan(
            inner_steps=self.steps,
            first_step=round_ * self.steps,
            total_steps=rounds * self.steps,
            k=64,
        )
        self.trainer.train(self.steps, plan)
        self.trainer.start_count()
        return contribute(self.exchange, 64)

    def follow(self, update: bytes) -> None:
        self.exchange.settle(included=True)
        self.exchange.apply(self.exchange.stage(update))
        self.exchange.write_parameters()


def outer(bodies: list[bytes], weights: list[float], theta: Array) -> bytes:
    """The coordinator's step; `theta` changes in place."""
    rules = OuterRules(aggregation="mean", alpha=1.0, momentum=0.0, bits=32)
    pieces = [
        Piece(start=0, num_elements=theta.size, weight=weight, scale=1.0, payload=body)
        for body, weight in zip(bodies, weights, strict=True)
    ]
    return outer_step(rules, pieces, theta=theta, residual=np.zeros_like(theta), momentum=None)


def test_one_step_of_sgd_with_lr_1_is_plain_averaging(corpus: Path) -> None:
    """H = 1, outer lr 1, dense: theta becomes the weighted average of the sites, round by round.

    A wrong sign of the pseudo-gradient moves theta away from it.
    """
    given = config(corpus, steps=1, optimizer="sgd", lr=1.0, max_grad_norm=0.1, weight_decay=0.0)
    sites = {name: OneRankSite(given, name) for name in WEIGHTS}
    theta = sites["paris"].parameters
    for round_ in range(3):
        before = theta.copy()
        bodies = [site.train(round_, 3) for site in sites.values()]
        average = sum(
            WEIGHTS[name] * site.parameters.astype(np.float64) for name, site in sites.items()
        )
        update = outer(bodies, list(WEIGHTS.values()), theta)
        np.testing.assert_allclose(theta, average, rtol=0, atol=2e-6)
        moved = np.abs(average - before).max()
        assert moved > 1e-3, "otherwise the comparison proves nothing"
        for site in sites.values():
            site.follow(update)
            assert site.parameters.tobytes() == theta.tobytes()


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_one_site_without_compression_is_local_training(corpus: Path, optimizer: str) -> None:
    """R = 1, dense, alpha = 1: the exchange changes parameters by rounding only."""
    given = config(corpus, steps=5, optimizer=optimizer, lr=3e-3)
    alone, exchanging = OneRankSite(given, "paris"), OneRankSite(given, "paris")
    theta = exchanging.parameters
    start = theta.copy()
    for round_ in range(3):
        alone.train(round_, 3)  # encodes, and never exchanges
        body = exchanging.train(round_, 3)
        exchanging.follow(outer([body], [1.0], theta))
    drift = np.abs(exchanging.parameters.astype(np.float64) - alone.parameters)
    assert np.abs(alone.parameters - start).max() > 5e-3
    assert drift.max() < 2e-5
    assert exchanging.exchange.state(exchanging.exchange.rows).error_feedback.count_nonzero() == 0
