"""examples/own_loop.py as its text says: a site of one process, and one of two under torchrun.

Compared with: theta of the coordinator, the tokens that were trained on, and the loss at the start.
Run alone: pytest tests/examples/test_own_loop.py
"""

from __future__ import annotations

import math
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w
from support.cluster import Cluster

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"
ROUNDS, H, PER_STEP = 12, 10, 8 * 16

pytestmark = pytest.mark.slow


def test_two_sites_one_of_them_with_two_ranks_under_ddp(tmp_path: Path) -> None:
    parameters = tmp_path / "theta.safetensors"
    with Cluster(
        tmp_path,
        run={"rounds": ROUNDS},
        inner={"steps": H, "max_local_steps": H},
        codec={"k": 256},
        eval={"every_rounds": 0},
    ) as cluster:
        python = sys.executable
        made = cluster.start("made", [python, str(EXAMPLE), "parameters", str(parameters)])
        assert made.wait() == 0, made.output
        config = tomllib.loads(cluster.config.read_text())
        cluster.config.write_text(tomli_w.dumps(config | {"model": f"file:{parameters}"}))
        cluster.coordinator()
        one = cluster.start("paris", [python, str(EXAMPLE), "train", cluster.address, "paris"])
        two = cluster.start(
            "oslo",
            [
                python, "-m", "torch.distributed.run", "--nproc-per-node", "2",
                "--standalone", str(EXAMPLE), "train", cluster.address, "oslo",
            ],
        )  # fmt: skip
        assert one.wait() == 0, one.output
        assert two.wait() == 0, two.output
        status = cluster.status()
        assert status["phase"] == "finished"
        again = cluster.start("again", [python, str(EXAMPLE), "train", cluster.address, "paris"])
        assert again.wait() == 0, again.output
        assert f"site paris rank 0: round {ROUNDS}, nothing left to train" in again.output
        sites = {site["name"]: site for site in status["sites"]}
        assert {site["theta_digest"] for site in sites.values()} == {status["theta_digest"]}
        assert sites["paris"]["tokens"] == ROUNDS * H * PER_STEP
        assert sites["oslo"]["tokens"] == 2 * ROUNDS * H * PER_STEP
        assert sites["oslo"]["train_bits_per_byte"] < 0.5 * math.log2(64)
