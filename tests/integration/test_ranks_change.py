"""A site comes back from its checkpoint with another number of ranks, and nothing is counted twice.

Compares theta digests at coordinator and site, and the tokens of all rounds with their number.

    pytest tests/integration/test_ranks_change.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cluster import Cluster

pytestmark = pytest.mark.slow

ROUNDS, STEPS, BATCH, SEQ_LEN = 30, 6, 4, 32


@pytest.mark.parametrize("sync", ["scape", "dense"])
def test_two_ranks_go_and_one_comes_back(tmp_path: Path, sync: str) -> None:
    inner = {"sync": sync, "steps": STEPS, "max_local_steps": STEPS}
    keep = ("--checkpoint", str(tmp_path / "ck"), "--checkpoint-every-rounds", "2")
    with Cluster(tmp_path, run={"rounds": ROUNDS}, quorum={"min_sites": 1}, inner=inner) as cluster:
        cluster.coordinator()
        two = cluster.site("paris", *keep, ranks=2)
        cluster.reaches(5)
        two.interrupt()
        assert two.wait(30) == 130, two.output
        one = cluster.site("paris", *keep, ranks=1, log="again")
        status = cluster.finish(one)
    assert "going on from the checkpoint" in one.output
    (site,) = status["sites"]
    assert site["theta_digest"] == status["theta_digest"]
    assert site["ranks"] == 1
    assert site["tokens"] == ROUNDS * STEPS * BATCH * SEQ_LEN
