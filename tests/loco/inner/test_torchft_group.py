"""Scape on the process group of torchft, which may change its members, against plain gloo.

torchft's wrapper tells every rank that it is rank 0 and refuses some collectives; the collectives
of loco.inner.groups must be among those it supports, and give the same bits.

Alone: python -m pytest tests/loco/inner/test_torchft_group.py
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import spawn_ranks

from loco.inner import Group, Scape
from tests.loco.inner.ranks import join_ranks


def train(rank: int, group: Group) -> tuple[torch.Tensor, int]:
    torch.manual_seed(0)
    w = torch.randn(8, 9).requires_grad_()
    opt = Scape([w], lr=0.1, density=0.3, group=group)
    torch.manual_seed(rank + 1)
    for _ in range(5):
        opt.zero_grad()
        (w * torch.randn(8, 9)).sum().backward()
        opt.step()
    return w.detach(), opt.bytes_sent


def check(rank: int, ranks: int, folder: str) -> None:
    from torchft.process_group import ProcessGroupGloo

    with join_ranks(rank, ranks, folder):
        expected, expected_bytes = train(rank, Group())
        master = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        ports = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
        dist.all_gather(ports, torch.tensor([master.port]))
        torchft_group = ProcessGroupGloo()
        torchft_group.configure(f"localhost:{int(ports[0])}/scape", f"r{rank}", rank, ranks)
        assert torchft_group.rank() == 0
        w, num_bytes = train(rank, Group(torchft_group, rank=rank))
        assert torch.equal(w, expected)
        assert num_bytes == expected_bytes
        dist.barrier()


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torchft", reason="torchft has no wheel for this machine")
    spawn_ranks(check, (2, str(tmp_path)), 2)
