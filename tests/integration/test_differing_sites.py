"""Sites of different speed under inner.sync_every_seconds, and one of them killed on the way.

Compared with: what each site says of its steps, and theta of the coordinator. Run alone:
pytest tests/integration/test_differing_sites.py
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from chaos.lives import Killed, Life, at
from chaos.runs import exact_run
from support.live import coordinating

from coordinator.events import ShardStored
from coordinator.store import Store
from loco.config import Config
from loco.model import build_model, layout_of, pack
from worker.trainer import Trainer

ROUNDS, H, EVERY_SECONDS = 5, 2, 0.6
SECONDS_A_STEP = {"oslo": 0.03, "paris": 0.15}


@pytest.mark.parametrize("delay", [0, 1])
def test_each_site_makes_as_many_steps_as_it_has_time_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delay: int
) -> None:
    torch.set_num_threads(1)
    step = Trainer._inner_step

    def slow_step(trainer: Trainer, lr: float) -> None:
        step(trainer, lr)
        time.sleep(SECONDS_A_STEP[trainer._name])

    monkeypatch.setattr(Trainer, "_inner_step", slow_step)
    raw = exact_run(seed=7, rounds=ROUNDS)
    raw["inner"] |= {"steps": H, "max_local_steps": 50, "sync_every_seconds": EVERY_SECONDS}
    raw["outer"] = {"delay_steps": delay}
    config = Config.model_validate(raw)
    model = build_model(config.model, seed=7)
    layout = layout_of(model)
    store = Store.create(
        tmp_path / "state", run_id="differ", config=config, layout=layout, theta=pack(model, layout)
    )
    with coordinating(store) as coordinator:
        checkpoint = tmp_path / "checkpoint"
        first = Life(
            coordinator.address, "paris", checkpoint=checkpoint, is_over=at("after push", 2)
        )
        oslo = Life(coordinator.address, "oslo")
        assert isinstance(first.ends(), Killed)
        paris = Life(coordinator.address, "paris", checkpoint=checkpoint)
        for life in (oslo, paris):
            life.finishes()
            assert life.worker._at.theta_digest == coordinator.state.theta_digest
        events = [e for _, e in coordinator.store.journal.replay(after=0)]
    shards = {site: [e for e in events if isinstance(e, ShardStored) and e.site == site]
              for site in SECONDS_A_STEP}  # fmt: skip
    per_step = config.data.batch * config.model.seq_len
    for site, told in shards.items():
        assert [e.round for e in told] == list(range(ROUNDS))  # each once, whatever happened
        assert told[0].inner_steps == H
        assert [e.data_cursor for e in told] == [
            sum(e.inner_steps for e in told[: i + 1]) for i in range(ROUNDS)
        ]
        assert all(e.tokens == e.inner_steps * per_step for e in told)
        most = EVERY_SECONDS / SECONDS_A_STEP[site]  # a step takes no less than its pause
        assert all(max(1, delay) <= e.inner_steps <= most + 1 for e in told[1:])
    for fast, slow in zip(shards["oslo"][1:], shards["paris"][1:], strict=True):
        assert fast.inner_steps > slow.inner_steps
