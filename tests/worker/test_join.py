"""`loco.join` in loops of users' own, against a real coordinator.

Compared with: the simulation of the same equations (in every bit), and a run by `loco worker`'s own
loop. Run alone: pytest tests/worker/test_join.py
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chaos.lives import Life
from support.joining import ROUNDS, H, digests, raw_run, run_of, tokens
from support.live import Coordinator, eventually
from torch import nn
from torch.utils.data import DataLoader

import loco
from loco.config import Config, config_from_dict
from loco.control import control
from loco.data import DataStream, load_parts
from loco.digest import chunk_hashes, theta_digest
from loco.errors import ConfigError, LocoError, NonFiniteError, RefusedError, UnreachableError
from loco.inner.build import build_inner, lr_at
from loco.inner.groups import Group
from loco.model import build_model, layout_of, pack
from loco.model.initial import initial_parameters


class Own(nn.Module):
    """A model that loco has never heard of: a tie, a frozen layer, a buffer, odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.nothing = nn.Parameter(torch.empty(0, 16))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.scale * self.body(self.frozen(self.embed(x))) + self.nothing.sum()
        return torch.nn.functional.cross_entropy(self.head(hidden), x)


def own_run(tmp_path: Path, **sections: dict[str, Any]) -> Config:
    torch.manual_seed(1)
    loco.save_parameters(Own(), tmp_path / "own.safetensors")
    raw = raw_run(**sections)
    raw["model"] = f"file:{tmp_path / 'own.safetensors'}"
    return config_from_dict(raw, source="test")


def own_model() -> Own:
    torch.manual_seed(7)  # other parameters than the run's: they come from the coordinator
    model = Own()
    torch.manual_seed(1)
    model.frozen.load_state_dict(Own().frozen.state_dict())
    return model


@pytest.mark.parametrize(
    "outer_config",
    [
        {"delay_steps": 0},
        {"delay_steps": 1},
        {"fragments": 3},
        {"unsent": "replica", "beta": 0.0, "aggregation": "mean"},
    ],
    ids=["blocking", "delayed", "fragments", "kept"],
)
def test_a_loop_of_ones_own_does_what_the_worker_does(
    tmp_path: Path, outer_config: dict[str, Any]
) -> None:
    """The same steps in a plain loop, at loco's learning rates: theta is equal in every bit."""
    config = Config.model_validate(raw_run(outer=outer_config))
    with run_of(config, tmp_path / "ours") as coordinator:
        Life(coordinator.address, "paris").finishes()
        ours = digests(coordinator), tokens(coordinator)
    with run_of(config, tmp_path / "theirs") as coordinator:
        model = build_model(config.model, seed=99)
        inner = build_inner(config.inner, model, Group())
        data = DataStream(
            load_parts(config.data.corpus, "train"), seq_len=config.model.seq_len,
            batch=config.data.batch, seed=config.run.seed, site="paris",
        )  # fmt: skip
        outer = loco.join(coordinator.address, site="paris", model=model)
        going = True
        while going:
            step = outer.data_cursor
            for group in inner.param_groups:
                group["lr"] = lr_at(config.inner, step, H * ROUNDS)
            inner.zero_grad()
            loss = model(*data.batch(step))
            loss.backward()
            inner.step()
            per_step = config.data.batch * config.model.seq_len
            going = outer.step(tokens=per_step, loss=float(loss.detach()))
        assert (digests(coordinator), tokens(coordinator)) == ours
        assert outer.finished
        assert outer.round == ROUNDS
        assert outer.step(tokens=1) is False
        outer.leave()
        final = pack(model, layout_of(model))
        assert theta_digest(chunk_hashes(final)) == coordinator.state.theta_digest


def test_any_model_ties_and_frozen_parameters_included(tmp_path: Path) -> None:
    """Two sites of a model of their own, AdamW and SGD, autocast and accumulation in one."""
    config = own_run(tmp_path, quorum={"min_sites": 2})
    with run_of(config, tmp_path / "state") as coordinator:
        finals: dict[str, nn.Module] = {}

        def site(name: str) -> None:
            model = finals[name] = own_model()
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer: torch.optim.Optimizer = (
                torch.optim.AdamW(trained, lr=1e-2)
                if name == "paris"
                else torch.optim.SGD(trained, lr=0.1)
            )
            generator = torch.Generator().manual_seed(len(name))
            with loco.join(coordinator.address, site=name, model=model, optimizer=optimizer) as out:
                while not out.finished:
                    for _ in range(2):  # gradient accumulation: one step of loco's
                        x = torch.randint(50, (8,), generator=generator)
                        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=name == "paris"):
                            loss = model(x)
                        loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    out.step(tokens=16)

        threads = [threading.Thread(target=site, args=(name,)) for name in ("paris", "oslo")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        paris, oslo = finals["paris"], finals["oslo"]
        for (name, a), b in zip(paris.named_parameters(), oslo.parameters(), strict=True):
            assert torch.equal(a, b), name
        assert paris.head.weight is paris.embed.weight
        assert tokens(coordinator) == [16 * H] * 2 * ROUNDS
        assert coordinator.state.phase == "finished"


def test_random_states_and_learning_rates_are_left_alone(tmp_path: Path) -> None:
    config = own_run(tmp_path)
    with run_of(config, tmp_path / "state") as coordinator:
        model = own_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        before = (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate())
        with loco.join(coordinator.address, site="paris", model=model, optimizer=optimizer) as out:
            while out.step(tokens=1, loss=1.0):
                pass
        assert torch.equal(torch.get_rng_state(), before[0])
        assert np.array_equal(np.random.get_state()[1], before[1])
        assert random.getstate() == before[2]
        assert optimizer.param_groups[0]["lr"] == 0.3


def test_two_optimizers_of_the_user_one_of_them_muon(tmp_path: Path) -> None:
    config = own_run(tmp_path)
    with run_of(config, tmp_path / "state") as coordinator:
        model = own_model()
        matrices = [p for p in model.body.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if all(p is not m for m in matrices)]
        optimizers = [torch.optim.Muon(matrices, lr=1e-2), torch.optim.SGD(others, lr=0.1)]
        with loco.join(coordinator.address, site="paris", model=model) as outer:
            before = [matrix.detach().clone() for matrix in matrices]  # the run's, by now
            while not outer.finished:
                model.zero_grad()
                model(torch.arange(8)).backward()
                for optimizer in optimizers:
                    optimizer.step()
                outer.step(tokens=8)
        assert coordinator.state.phase == "finished"
        assert not any(torch.equal(*pair) for pair in zip(before, matrices, strict=True))
        final = pack(model, layout_of(model))
        assert theta_digest(chunk_hashes(final)) == coordinator.state.theta_digest


def test_compiled_models_are_looked_through(tmp_path: Path) -> None:
    config = own_run(tmp_path)
    with run_of(config, tmp_path / "state") as coordinator:
        model = own_model()
        compiled = torch.compile(model, backend="eager")
        with loco.join(coordinator.address, site="paris", model=compiled) as outer:
            while not outer.finished:
                compiled(torch.arange(8)).backward()
                outer.step(tokens=8)
        assert coordinator.state.phase == "finished"


def test_a_loop_with_forked_data_loaders_goes_on(tmp_path: Path) -> None:
    """Users' loaders fork a process that has gRPC's threads: neither side may hang."""
    with run_of(own_run(tmp_path), tmp_path / "state") as coordinator:
        model = own_model()
        data = torch.arange(40).view(20, 2)
        with loco.join(coordinator.address, site="paris", model=model) as outer:
            while not outer.finished:
                batches = DataLoader(
                    data, batch_size=4, num_workers=2, multiprocessing_context="fork", timeout=20
                )
                for batch in batches:
                    model(batch.flatten()).backward()
                    if not outer.step(tokens=8):
                        break
        assert coordinator.state.phase == "finished"


def test_a_site_that_comes_back_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Left in the middle of a round: the next life makes the same rounds as one without a break."""

    def train(coordinator: Coordinator, until: int, checkpoint: Path) -> int:
        model = own_model()
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
        with loco.join(
            coordinator.address, site="paris", model=model, optimizer=optimizer,
            checkpoint=checkpoint, checkpoint_every_rounds=1,
        ) as outer:  # fmt: skip
            begun = outer.data_cursor
            while not outer.finished and outer.data_cursor < until:
                x = torch.arange(8) + outer.data_cursor
                model(x).backward()
                optimizer.step()
                optimizer.zero_grad()
                outer.step(tokens=8)
        return begun

    config = own_run(tmp_path)
    with run_of(config, tmp_path / "one") as coordinator:
        assert train(coordinator, 10**6, tmp_path / "ck1") == 0
        whole = digests(coordinator)
    with run_of(config, tmp_path / "two") as coordinator:
        train(coordinator, 2 * H + 1, tmp_path / "ck2")
        assert train(coordinator, 10**6, tmp_path / "ck2") == 2 * H
        assert digests(coordinator) == whole


# --- what goes wrong ------------------------------------------------------------------------------


def test_a_model_of_another_shape_is_refused_and_its_tensor_named(tmp_path: Path) -> None:
    with run_of(own_run(tmp_path), tmp_path / "state") as coordinator:
        other = own_model()
        other.body[0] = nn.Linear(16, 33)
        other.body[2] = nn.Linear(33, 16)
        with pytest.raises(RefusedError, match=r"body\.0\.weight"):
            loco.join(coordinator.address, site="paris", model=other)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda model: model.to(torch.bfloat16), "scale is torch.bfloat16"),
        (lambda model: model.requires_grad_(False), "no trainable parameters"),
    ],
)
def test_models_that_cannot_be_exchanged(change: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        loco.join("127.0.0.1:1", site="paris", model=change(Own()))


def test_a_sharded_parameter_is_named() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model = Own()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = model.body[0].weight.detach()
        model.body[0].weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
        with pytest.raises(ConfigError, match=r"body\.0\.weight is sharded"):
            loco.join("127.0.0.1:1", site="paris", model=model)
    finally:
        torch.distributed.destroy_process_group()


def test_nobody_answers() -> None:
    with pytest.raises(UnreachableError, match="did not answer"):
        loco.join("127.0.0.1:1", site="paris", model=Own(), patience_seconds=0.3)


def test_a_loss_that_is_not_finite_ends_the_site_and_nothing_was_sent(tmp_path: Path) -> None:
    with run_of(own_run(tmp_path), tmp_path / "state") as coordinator:
        outer = loco.join(coordinator.address, site="paris", model=own_model())
        outer.step(tokens=1, loss=1.0)
        with pytest.raises(NonFiniteError, match="training loss"):
            outer.step(tokens=1, loss=float("nan"))
        assert outer.finished
        assert tokens(coordinator) == []
        eventually(lambda: coordinator.state.sites["paris"].status == "left", "it said goodbye")


def test_leaving_early_says_goodbye_and_an_exception_does_too(tmp_path: Path) -> None:
    with run_of(own_run(tmp_path), tmp_path / "state") as coordinator:
        outer = loco.join(coordinator.address, site="paris", model=own_model())

        def loop_with_a_fault() -> None:
            with outer:
                outer.step(tokens=1)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            loop_with_a_fault()
        eventually(lambda: coordinator.state.sites["paris"].status == "left", "it has left")
        assert outer.finished


@contextlib.contextmanager
def ctrl_c_interrupts() -> Iterator[None]:
    """As in a terminal, also where a shell has started the tests behind itself: it ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_who_leaves_while_others_are_waited_for_need_not_wait(tmp_path: Path) -> None:
    """As Ctrl+C in `with loco.join`, during a step that waits, and before the first one."""
    config = own_run(tmp_path, quorum={"min_sites": 1})
    with run_of(config, tmp_path / "state") as coordinator:
        model = own_model()
        outer = loco.join(coordinator.address, site="paris", model=model)
        control(coordinator.address, "pause", None)
        looping = threading.Thread(target=lambda: [outer.step(tokens=1) for _ in range(2 * H)])
        looping.start()
        eventually(lambda: coordinator.state.round == 1, "the round is over, and no other opens")
        outer.leave()
        looping.join()
        assert outer.finished
        assert coordinator.state.sites["paris"].status == "left"

        def interrupt() -> None:
            eventually(lambda: coordinator.state.sites["paris"].status == "ready", "it waits")
            os.kill(os.getpid(), signal.SIGINT)

        interrupting = threading.Thread(target=interrupt)
        with ctrl_c_interrupts():
            interrupting.start()
            with pytest.raises(KeyboardInterrupt):
                loco.join(coordinator.address, site="paris", model=own_model())
        interrupting.join()
        assert coordinator.state.sites["paris"].incarnation == 2
        assert coordinator.state.sites["paris"].status == "left"


def test_ctrl_c_in_a_step_ends_a_site_that_is_no_context_manager(tmp_path: Path) -> None:
    """Else its process never ends: one thread waits for the round, one says that the site lives."""
    config = own_run(tmp_path, quorum={"min_sites": 1})
    with run_of(config, tmp_path / "state") as coordinator:
        outer = loco.join(coordinator.address, site="paris", model=own_model())
        control(coordinator.address, "pause", None)

        def interrupt() -> None:
            eventually(lambda: coordinator.state.round == 1, "the round is over, none opens")
            os.kill(os.getpid(), signal.SIGINT)

        interrupting = threading.Thread(target=interrupt)
        with ctrl_c_interrupts():
            interrupting.start()
            with pytest.raises(KeyboardInterrupt):
                [outer.step(tokens=1) for _ in range(2 * H)]
        interrupting.join()
        assert outer.finished
        assert coordinator.state.sites["paris"].status == "left"
        assert not [thread for thread in threading.enumerate() if thread.name == "loco rounds"]


def test_a_loop_that_knows_no_loss_is_seen_all_the_same(tmp_path: Path) -> None:
    with run_of(own_run(tmp_path), tmp_path / "state") as coordinator:
        with loco.join(coordinator.address, site="paris", model=own_model()) as outer:
            while outer.step(tokens=1):
                pass

        def told(name: str) -> float | None:
            return coordinator.running.monitor.registry.get_sample_value(name, {"site": "paris"})

        eventually(lambda: told("loco_mask_density_ratio") == 1, "its rounds are reported")
        assert told("loco_ef_norm") == 0  # nothing was trained
        assert told("loco_train_bits_per_byte") is None
        assert told("loco_grad_norm") is None


def test_files_of_parameters_that_are_none(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "plain.safetensors")
    (tmp_path / "noise.safetensors").write_bytes(b"noise")
    for name, told in (
        ("plain.safetensors", "does not tell the order"),
        ("noise.safetensors", "cannot read"),
        ("missing.safetensors", "cannot read"),
    ):
        raw = raw_run() | {"model": f"file:{tmp_path / name}"}
        with pytest.raises(ConfigError, match=told):
            initial_parameters(config_from_dict(raw, source="test"))


def test_the_plain_worker_says_how_to_join_such_a_run(tmp_path: Path) -> None:
    with run_of(own_run(tmp_path), tmp_path / "state") as coordinator:
        error = Life(coordinator.address, "paris").ends()
        assert isinstance(error, LocoError)
        assert "loco.join" in str(error)
