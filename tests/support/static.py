"""What static groups of ranks compute, one number of ranks after another: nothing dies here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from support.ranks import spawn_ranks

from loco.config import Config
from loco.inner import Group, reshard
from loco.wire.v1 import coordinator_pb2 as pb
from worker.elastic.wire import digest_of
from worker.site import Site
from worker.trainer import Trainer

Phases = list[tuple[int, int]]  # ranks, steps


def static_hashes(
    folder: Path, config: Config, corpus: Path, phases: Phases, steps: int
) -> list[str]:
    """The hash of all parameters after each step, with the ranks of each phase."""
    ranks = max(size for size, _ in phases)
    arguments = (str(folder), config.model_dump_json(), str(corpus), phases, steps)
    spawn_ranks(_rank, arguments, ranks)
    told = [(folder / f"hashes-{rank}").read_text().split("\n") for rank in range(ranks)]
    for phase, (size, count) in enumerate(phases):
        assert all(told[rank][phase] == told[0][phase] for rank in range(size))
        assert len(told[0][phase].split()) == count
    return " ".join(told[0]).split()


def _rank(
    rank: int, folder: str, config_json: str, corpus: str, phases: Phases, steps: int
) -> None:
    """One rank, in those phases that have it."""
    torch.set_num_threads(1)
    config = Config.model_validate_json(config_json)
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(max(size for size, _ in phases)),
        "LOCO_INIT_METHOD": f"file://{folder}/rendezvous",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with mock.patch.dict(os.environ, environment):
        Site.join("cpu")
    hashes = []
    for number, (size, count) in enumerate(phases):
        members = dist.new_group(list(range(size)))
        if rank < size:
            site = Site(torch.device("cpu"), Group(members, rank=rank))
            trainer = Trainer(config, site, "paris", corpus)
            if number > 0:
                _go_on(trainer, folder, number, phases)
            hashes.append(" ".join(_train(trainer, count, steps)))
            state = [trainer.model.state_dict(), trainer.optimizer.state_dict()]
            torch.save(state, f"{folder}/state-{number}-{rank}")
            site.group.drop()
        else:
            hashes.append("")
        dist.barrier()
    Path(f"{folder}/hashes-{rank}").write_text("\n".join(hashes))
    dist.destroy_process_group()


def _go_on(trainer: Trainer, folder: str, number: int, phases: Phases) -> None:
    """Take the states that the ranks of the phase before left."""
    rank, size = trainer.optimizer.group.rank, trainer.optimizer.group.size
    before, _ = phases[number - 1]
    states = [torch.load(f"{folder}/state-{number - 1}-{r}") for r in range(before)]
    trainer.optimizer.load_state_dict(reshard([s for _, s in states], rank=rank, size=size))
    trainer.model.load_state_dict(states[0][0])
    done = sum(count for _, count in phases[:number])
    trainer.join_in(done, done)


def _train(trainer: Trainer, count: int, steps: int) -> Iterator[str]:
    for _ in range(count):
        trainer.train(1, pb.RoundPlan(first_step=0, total_steps=steps))
        yield digest_of(list(trainer.model.parameters()))
