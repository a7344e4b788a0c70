"""A coordinator's memory over a hundred rounds, most of which fail for a site in some way.

Compared with: what it held after the first quarter. benchmarks/rounds.py measures the process.
Run alone: pytest tests/coordinator/test_memory.py
"""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import grpc
import pytest
from support.live import Member, coordinating, eventually
from support.runs import LAYOUT, config_of, create_store, shard_body, vector

ROUNDS = 100
CONFIG = config_of(
    quorum={"min_sites": 1, "grace_seconds": 0.01, "quarantine_after": 1000},
    run={"rounds": ROUNDS + 1},
    state={"snapshot_every_rounds": 5, "keep_updates": 6},
    codec={"bits": 32},
    outer={"aggregation": "mean"},
)
BODY = shard_body(vector(LAYOUT, 1, scale=1e-3), CONFIG)  # dense: 112 KiB


def fail(site: Member, round_: int) -> None:
    """Malformed, broken off half way, stale, or not at all."""
    match round_ % 4:
        case 0:
            header, body = site.header(round_, BODY[:-4]), BODY[:-4]
        case 1:
            header, body = site.header(round_, BODY), BODY[: len(BODY) // 2]
        case 2:
            header, body = site.header(round_ + 7, BODY), BODY
        case _:
            return
    with pytest.raises(grpc.RpcError):
        site.send(header, body)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_it_is_flat_over_a_hundred_rounds_also_failed_ones(tmp_path: Path) -> None:
    held: list[int] = []
    with (
        coordinating(create_store(tmp_path, CONFIG)) as coordinator,
        Member(coordinator, "paris") as paris,
        Member(coordinator, "oslo") as oslo,
    ):
        paris.enter()
        oslo.enter()
        tracemalloc.start()
        for round_ in range(ROUNDS):
            eventually(lambda: coordinator.state.phase == "open", "a round is open")
            fail(oslo, round_)
            paris.push(round_, BODY)
            eventually(lambda: coordinator.state.round == round_ + 1, "it is closed")  # noqa: B023
            if round_ in (ROUNDS // 4, ROUNDS - 1):
                gc.collect()
                held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert coordinator.metric("loco_rejections_total", reason="payload") >= ROUNDS // 4
    grown = held[1] - held[0]
    print(f"held {held[0]} bytes after a quarter of the rounds, {grown} more at their end")
    assert grown < 10 * len(BODY), f"{grown} bytes in {ROUNDS * 3 // 4} rounds"
