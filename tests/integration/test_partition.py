"""A partition costs no inner step, however many updates follow it.

Compared with: theta + progress, computed from exact binary fractions; and the steps that a real
worker made against those that the coordinator counted. Run alone:
pytest tests/integration/test_partition.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from chaos.lives import Life
from chaos.numpy_site import NumpySite, SiteThread
from chaos.proxy import Proxy
from chaos.runs import exact_run
from support.contributing import contribute
from support.live import coordinating, eventually
from support.runs import config_of
from torch import nn

from coordinator.events import ShardStored
from coordinator.store import Store
from loco import codec
from loco.config import Config
from loco.control import control
from loco.inner.groups import Group
from loco.model import build_model, layout_of, pack
from worker import meanwhile
from worker.exchange import Exchange
from worker.site import Site

H, MAX_LOCAL = 2, 8


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5000))


def dense(values: np.ndarray) -> bytes:
    return codec.encode_dense(values.astype(np.float32)).payload


@pytest.mark.parametrize("updates", [1, 2, 5])
@pytest.mark.parametrize("steps_between", [False, True])
def test_progress_is_kept_over_any_number_of_updates(updates: int, steps_between: bool) -> None:
    """Sums of powers of two: each number below is exact, so equality is equality of bits."""
    model = Plain()
    layout = layout_of(model)
    config = config_of(codec={"bits": 32})
    exchange = Exchange(config, Site(torch.device("cpu"), Group()), model, layout)
    exchange.load(pack(model, layout).tobytes(), 0)
    exchange.write_parameters()
    move(model, 1.0)  # H inner steps, which are contributed
    contribute(exchange, 64)
    move(model, 0.25)  # ... and those of the partition
    progress = 0.25
    theta = 0.0
    for i in range(updates):
        exchange.settle(included=i == 0)
        exchange.apply(exchange.stage(dense(padded(layout.num_elements, -4.0))))
        exchange.write_parameters(keep_progress=True)
        theta += 4.0
        if steps_between:
            move(model, 0.5)
            progress += 0.5
    assert model.weight.detach().unique().tolist() == [theta + progress]


def test_steps_after_an_update_are_measured_from_it() -> None:
    """The coordinator goes away when the site has applied an update and not yet trained."""
    model = Plain()
    layout = layout_of(model)
    exchange = Exchange(
        config_of(codec={"bits": 32}), Site(torch.device("cpu"), Group()), model, layout
    )
    exchange.load(pack(model, layout).tobytes(), 0)
    exchange.write_parameters()
    move(model, 1.0)
    contribute(exchange, 64)
    exchange.settle(included=True)
    exchange.apply(exchange.stage(dense(padded(layout.num_elements, -4.0))))
    exchange.write_parameters()
    move(model, 0.5)
    exchange.apply(exchange.stage(dense(padded(layout.num_elements, -4.0))))
    exchange.write_parameters(keep_progress=True)
    assert model.weight.detach().unique().tolist() == [8.5]


def move(model: Plain, by: float) -> None:
    with torch.no_grad():
        model.weight += by


def padded(size: int, value: float) -> np.ndarray:
    out = np.zeros(size)
    out[:5000] = value
    return out


@pytest.mark.parametrize("kind", ["resets", "swallows"])
def test_a_site_goes_on_through_a_partition_up_to_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Every inner step is in a contribution that was included, once."""
    monkeypatch.setattr(meanwhile, "AWAY_SECONDS", 2.0)
    monkeypatch.setattr(meanwhile, "VOTE_SECONDS", 0.1)
    torch.set_num_threads(1)
    raw = exact_run(seed=3)
    raw["inner"]["max_local_steps"] = MAX_LOCAL
    raw["quorum"] |= {"min_sites": 1, "grace_seconds": 0.5}
    config = Config.model_validate(raw)
    model = build_model(config.model, seed=3)
    layout = layout_of(model)
    store = Store.create(
        tmp_path, run_id="partition", config=config, layout=layout, theta=pack(model, layout)
    )
    with coordinating(store) as coordinator:
        host, port = coordinator.address.split(":")
        proxy = Proxy((host, int(port)))
        paris = Life(proxy.address, "paris")
        eventually(lambda: coordinator.state.round > 1, "rounds are made")
        if kind == "resets":
            proxy.partition()
        else:  # connections stay open, nothing passes: no call fails before keepalive does
            proxy.change(flowing=False)
        eventually(
            lambda: paris.worker._trainer.local_steps == MAX_LOCAL - H, "the limit is reached"
        )
        oslo = SiteThread(NumpySite(coordinator.address, "oslo", layout))
        proxy.heal()
        eventually(lambda: any(s.inner_steps == MAX_LOCAL for s in shards(store)), "it tells all")
        control(coordinator.address, "drain", None)
        paris.finishes()
        oslo.join()
        mine = [s for s in shards(store) if s.site == "paris"]
        assert {s.inner_steps for s in mine} == {H, MAX_LOCAL}
        assert sum(s.inner_steps for s in mine) == mine[-1].data_cursor
        per_step = config.data.batch * config.model.seq_len
        assert sum(s.tokens for s in mine) == mine[-1].data_cursor * per_step
        assert paris.worker._at.theta_digest == coordinator.state.theta_digest
        proxy.close()


def shards(store: Store) -> list[ShardStored]:
    return [e for _, e in store.journal.replay(after=0) if isinstance(e, ShardStored)]
