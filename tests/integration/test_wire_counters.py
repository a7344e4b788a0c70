"""Byte counters against a network card's own: one site, one rank, a cable that nobody else uses.

Compares what coordinator and site count with the card's counters in private network namespaces
(they add the headers of HTTP/2, TCP, IP and Ethernet). Needs root.

    pytest tests/integration/test_wire_counters.py
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.certs import Certs
from support.cluster import Cluster, loco, run_loco
from support.namespaces import HUB, card_bytes, two_hosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"),
        reason="needs root, iproute2 and unshare for network namespaces",
    ),
]

ROUNDS = 6
CONFIG: dict[str, dict[str, Any]] = {
    "run": {"rounds": ROUNDS},
    "model": {"dim": 128, "num_layers": 2, "num_heads": 4, "ffn_dim": 384},
    "data": {"batch": 2},
    "inner": {"steps": 1},
    "codec": {"bits": 32, "k_start": 64, "k_ramp_rounds": 1},  # dense: many bytes in few rounds
    "outer": {"aggregation": "mean"},
    "quorum": {"min_sites": 1},
}


def test_counters_agree_with_the_card(tmp_path: Path) -> None:
    with two_hosts() as far, Cluster(tmp_path, **CONFIG) as cluster:
        cluster.address = f"{HUB}:29400"
        certs = Certs(tmp_path / "certs", hosts=(HUB,))
        cluster.coordinator("--bundle", str(certs.coordinator)).says("listening on")
        before = {"up": card_bytes("rx"), "down": card_bytes("tx")}
        paris = cluster.start(
            "paris",
            far.command(
                *loco("worker", "--coordinator", cluster.address, "--site", "paris"),
                *("--threads", "1", "--bundle", str(certs.bundle("paris"))),
            ),
        )
        assert paris.wait() == 0, paris.output
        after = {"up": card_bytes("rx"), "down": card_bytes("tx")}
        ops = ("--bundle", str(certs.bundle("ops", role="operator")))
        # A process of its own: gRPC's threads in this one may live in another namespace.
        status = json.loads(run_loco("status", cluster.address, "--json", *ops).stdout)
    (site,) = status["sites"]
    assert status["round"] == ROUNDS
    for direction in ("up", "down"):
        counted, card = site[f"bytes_{direction}"], after[direction] - before[direction]
        print(f"{direction}: counted {counted}, card {card}, ratio {counted / card:.4f}")
        assert counted > 8e6
        assert counted == pytest.approx(card, rel=0.05)
        assert counted < card, "the card sees headers that we do not count"
    dense = status["dense_bytes_per_round"]
    assert site["bytes_up_by_kind"]["contribution"] == pytest.approx(ROUNDS * dense, rel=0.05)
