"""Sites trained as one against sites that take turns; an exact downlink against a coded one.

Run alone: pytest tests/benchmarks/test_fleet.py
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from benchmarks import overlap
from benchmarks.fleet import Lockstep, train
from benchmarks.simulation import Simulation
from loco.config import Config

SITES = {"oslo": "sotu:2000-2009", "paris": "sotu:1790-1799", "kyoto": "sotu:1900-1910"}


def config_of_run(**sections: dict[str, Any]) -> Config:
    raw: dict[str, Any] = {
        "run": {"rounds": 3},
        "model": {"dim": 16, "num_layers": 2, "num_heads": 4, "ffn_dim": 24, "seq_len": 16},
        "data": {"batch": 3, "corpus": "sotu:1790-1799", "sites": SITES},
        "inner": {"steps": 4, "warmup_steps": 2, "max_grad_norm": 0.3},
        "eval": {"sequences": 4},
    }
    for name, section in sections.items():
        raw[name] = raw.get(name, {}) | section
    return Config.model_validate(raw)


@pytest.mark.parametrize("delay", [0, 2])
def test_a_fleet_trains_as_its_sites_would_alone(delay: int) -> None:
    """Dense contributions, because a rounding may change which values are the largest."""
    config = config_of_run(
        outer={"aggregation": "mean", "beta": 0.0, "delay_steps": delay}, codec={"bits": 32}
    )
    alone, fleet = Simulation(config), Lockstep(Simulation(config), {})
    start = alone.theta.copy()
    train([fleet])
    for one, other in zip(alone.rounds(), fleet.rounds, strict=True):
        assert other.train_bpb == pytest.approx(one.train_bpb, rel=1e-5)
    np.testing.assert_allclose(fleet.simulation.theta, alone.theta, atol=2e-6)
    assert np.abs(alone.theta - start).max() > 1e-3
    assert fleet.simulation.evaluate() == pytest.approx(alone.evaluate(), rel=1e-5)


def test_runs_in_lockstep_end_as_each_would_alone() -> None:
    """Dense contributions again; two delays, and a control that differs by a millionth."""
    dense = {"codec": {"bits": 32}}
    configs = [
        config_of_run(outer={"aggregation": "mean", "beta": 0.0, "delay_steps": delay}, **dense)
        for delay in (0, 2, 4)
    ]
    runs = [Lockstep(Simulation(config), {}) for config in configs]
    runs.append(Lockstep(overlap.disturbed(Simulation(configs[0]), 1), {}))
    train(runs)
    alone = [Simulation(config) for config in configs]
    for simulation in alone:
        assert len(list(simulation.rounds())) == 3
    for run, simulation in zip(runs, [*alone, alone[0]], strict=True):
        np.testing.assert_allclose(run.simulation.theta, simulation.theta, atol=1e-5)
    thetas = [run.simulation.theta for run in runs]
    assert all(np.abs(a - b).max() > 1e-4 for a, b in itertools.combinations(thetas[:3], 2))
    assert (thetas[3] != thetas[0]).any()


def test_an_exact_downlink_moves_theta_by_the_mean_of_what_was_sent() -> None:
    """The coded one by something near it; the first contributions of both are the same."""
    config = config_of_run(codec={"k": 32, "k_sites": 3})
    coded, exact = Simulation(config), Simulation(config, exact_downlink=True)
    start = coded.theta.copy()
    few, many = next(coded.rounds()), next(exact.rounds())
    assert few.bytes_up == many.bytes_up
    assert few.bytes_down < many.bytes_down / 5
    moved = exact.theta - start
    assert 0 < np.linalg.norm(coded.theta - exact.theta) < 0.2 * np.linalg.norm(moved)
