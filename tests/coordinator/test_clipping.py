"""Clipping by the median norm through the real service: pushes in, theta out.

Compared with: the outer step in float64 NumPy, from what the sites sent. Run alone:
pytest tests/coordinator/test_clipping.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.live import Member, coordinating, eventually
from support.runs import LAYOUT, Array, config_of, create_store, vector

from coordinator.recovery import recover
from coordinator.reducer import norm_scales
from coordinator.store import Store

SCALES = {"kyoto": 1.0, "lima": 0.5, "oslo": 1.5, "paris": 80.0, "quito": 0.0}  # of the values
TOKENS = {"kyoto": 100, "lima": 300, "oslo": 200, "paris": 150, "quito": 250}
RANKS = {"kyoto": 1, "lima": 1, "oslo": 1, "paris": 3, "quito": 1}  # a norm is of all shards


def update_of(sent: dict[str, Array], max_ratio: float | None) -> np.ndarray:
    """sum w min(1, limit / |v|) v / sum w, where limit is `max_ratio` times the median norm."""
    norms = {site: np.linalg.norm(v.astype(np.float64)) for site, v in sent.items()}
    limit = np.inf if max_ratio is None else max_ratio * np.median(list(norms.values()))
    total = np.zeros(LAYOUT.num_elements)
    for site, v in sent.items():
        scale = 1.0 if norms[site] <= limit else limit / norms[site]
        total += TOKENS[site] / sum(TOKENS.values()) * scale * v.astype(np.float64)
    return total


@pytest.mark.parametrize("max_ratio", [None, 1.0, 2.0])
def test_theta_moves_by_the_clipped_mean(tmp_path: Path, max_ratio: float | None) -> None:
    config = config_of(
        codec={"bits": 32},
        outer={"aggregation": "mean", "max_norm_ratio": max_ratio},
        quorum={"min_sites": len(SCALES)},
        run={"rounds": 1},
    )
    theta = vector(LAYOUT, 0)
    sent = {site: vector(LAYOUT, i, scale=s) for i, (site, s) in enumerate(SCALES.items(), 1)}
    with coordinating(create_store(tmp_path, config, theta=theta)) as coordinator:
        members = [Member(coordinator, site, ranks=RANKS[site]) for site in SCALES]
        for member in members:
            member.enter()
        for member in reversed(members):
            member.contribute(0, sent[member.site], tokens=TOKENS[member.site])
        eventually(lambda: coordinator.state.phase == "finished", "the round is committed")
    store = Store.open(tmp_path)
    moved = theta - recover(store)[1].theta
    store.close()
    expected = update_of(sent, max_ratio)
    np.testing.assert_allclose(moved, expected, rtol=1e-4, atol=2e-6)
    if max_ratio is not None:  # and the clipping is what made it so
        assert np.abs(moved - update_of(sent, None)).max() > 10 * np.abs(expected).max()


def test_a_clipped_contribution_keeps_its_weight_among_the_senders(tmp_path: Path) -> None:
    """Sparse, mean over senders: each coordinate is the weighted mean of the clipped values."""
    config = config_of(
        codec={"k": 4096},
        outer={"aggregation": "mean_contributors", "max_norm_ratio": 1.0},
        quorum={"min_sites": 3},
        run={"rounds": 1},
    )
    theta = np.zeros(LAYOUT.num_elements, np.float32)
    first = LAYOUT.parameters[1].start
    values = {"kyoto": 1.0, "oslo": 1.0, "paris": 64.0}  # exact in every level code
    with coordinating(create_store(tmp_path, config, theta=theta)) as coordinator:
        members = [Member(coordinator, site) for site in values]
        for member in members:
            member.enter()
        for member in members:
            v = np.zeros_like(theta)
            v[first : first + 100] = values[member.site]
            member.contribute(0, v, tokens=TOKENS[member.site])
        eventually(lambda: coordinator.state.phase == "finished", "the round is committed")
    store = Store.open(tmp_path)
    moved = theta - recover(store)[1].theta
    store.close()
    expected = np.zeros_like(theta)
    expected[first : first + 100] = 1.0  # 64 comes down to the median, 1, and weighs as before
    np.testing.assert_array_equal(moved, expected)


def test_where_most_send_nothing_the_others_are_not_clipped() -> None:
    """What is scaled to nothing would still leave its site's error feedback."""
    assert norm_scales({"kyoto": 0.0, "lima": 3.0, "oslo": 0.0}, 2.0) == {
        "kyoto": 1.0, "lima": 1.0, "oslo": 1.0
    }  # fmt: skip
