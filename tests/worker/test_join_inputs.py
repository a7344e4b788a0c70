"""What `loco.join` is given: wrong values and models, each a clear line; SCAPE as the optimizer.

Compared with: the words of the refusal; for SCAPE theta of the coordinator, the tokens that it
counted, and the loss before. Run alone: pytest tests/worker/test_join_inputs.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.joining import ROUNDS, H, digests, raw_run, run_of, tokens
from support.live import Coordinator
from torch import nn

import loco
from loco.config import config_from_dict
from loco.digest import chunk_hashes, theta_digest
from loco.errors import ConfigError
from loco.inner import Scape
from loco.model import layout_of, pack

NOBODY = "127.0.0.1:1"


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    loco.save_parameters(small(), tmp_path / "theta.safetensors")
    raw = raw_run() | {"model": f"file:{tmp_path / 'theta.safetensors'}"}
    with run_of(config_from_dict(raw, source="test"), tmp_path / "state") as running:
        yield running


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"checkpoint_every_rounds": 0}, "checkpoint_every_rounds is 0; .* at least 1"),
        ({"patience_seconds": -1.0}, "patience_seconds is -1.0; .* at least 0"),
        ({"patience_seconds": float("nan")}, "patience_seconds is nan"),
        ({"link_mbit": 0.0}, "link_mbit 0.0 is not possible: use a rate above 0"),
        ({"link_mbit": -3.0}, "link_mbit -3.0"),
        ({"link_mbit": float("nan")}, "link_mbit nan"),
        ({"link_mbit": float("inf")}, "link_mbit inf"),
    ],
)
def test_numbers_that_cannot_be_are_refused_by_name(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        loco.join(NOBODY, site="paris", model=small(), **options)


def test_a_world_that_is_no_number_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "abc")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE='abc' .* must be a number"):
        loco.join(NOBODY, site="paris", model=small())


@pytest.mark.parametrize("given", [0, -1])
def test_a_step_without_tokens_is_refused_where_it_is_told(
    given: int, coordinator: Coordinator
) -> None:
    """The coordinator would refuse the whole contribution: a site's weight is at least 1."""
    with loco.join(coordinator.address, site="paris", model=small()) as outer:
        with pytest.raises(ConfigError, match=rf"tokens is {given}; it must be at least 1"):
            outer.step(tokens=given)
        while outer.step(tokens=1):  # nothing was counted, and the site goes on
            pass
    assert tokens(coordinator) == [H] * ROUNDS


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.filterwarnings("ignore")  # torch's own, of FSDP without a GPU
def test_a_model_in_fsdp_is_refused_by_name(use_orig_params: bool, group_of_one: None) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(
        small(), device_id=torch.device("cpu"), use_orig_params=use_orig_params
    )
    for given in (model, nn.Sequential(model)):
        with pytest.raises(
            ConfigError, match=r"FullyShardedDataParallel.* a replica on every rank"
        ):
            loco.join(NOBODY, site="paris", model=given)
    if not use_orig_params:
        flat = nn.Module()
        flat.register_parameter("all", next(model.parameters()))
        with pytest.raises(ConfigError, match=r"parameter all is a FlatParameter"):
            loco.join(NOBODY, site="paris", model=flat)


def test_a_checkpoint_of_another_optimizer_says_so(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    def life(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        with loco.join(
            coordinator.address, site="paris", model=model, optimizer=optimizer,
            checkpoint=tmp_path / "ck", checkpoint_every_rounds=1,
        ) as outer:  # fmt: skip
            for _ in range(steps):
                model(torch.ones(1, 8)).sum().backward()
                optimizer.step()
                outer.step(tokens=1)

    model = small()
    life(model, torch.optim.AdamW(model.parameters(), lr=1e-3), 2 * H)
    model = small()
    two = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
    with pytest.raises(ConfigError, match=r"does not fit this SGD .*another checkpoint directory"):
        life(model, torch.optim.SGD(two, lr=1e-3), H)


def test_scape_of_ones_own_in_ones_own_loop(coordinator: Coordinator, group_of_one: None) -> None:
    """The optimizer that synchronises the ranks of a site trains between the exchanges."""
    model = small()
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    optimizer = Scape(model.parameters(), lr=1e-2, density=0.5)
    before = float(nn.functional.mse_loss(model(x), x).detach())
    with loco.join(coordinator.address, site="paris", model=model, optimizer=optimizer) as outer:
        while not outer.finished:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), x)
            loss.backward()
            optimizer.step()
            outer.step(tokens=32, loss=float(loss.detach()))
    assert len(digests(coordinator)) == ROUNDS
    assert tokens(coordinator) == [32 * H] * ROUNDS
    final = pack(model, layout_of(model))
    assert theta_digest(chunk_hashes(final)) == coordinator.state.theta_digest
    assert float(nn.functional.mse_loss(model(x), x).detach()) < before
