"""A training loop of your own, with a model of your own, as a site of a run.

    python examples/own_loop.py parameters theta.safetensors     # once
    loco coordinator run.toml ...     # with model = "file:theta.safetensors"
    python examples/own_loop.py train HOST:PORT paris
    torchrun --standalone --nproc-per-node 2 examples/own_loop.py train HOST:PORT oslo  # DDP

Only the four lines with `outer` are loco's. Everything else is what such a loop has anyway.
"""

from __future__ import annotations

import gc
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import loco

VOCABULARY, WIDTH, LENGTH, BATCH = 64, 32, 16, 8


class Bigrams(nn.Module):
    """Predicts a token from the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats; `tokens` is [B, S] int64."""
        logits = self.mix(self.embed(tokens[:, :-1])) @ self.embed.weight.T  # [B, S - 1, V]
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batch(step: int, rank: int) -> torch.Tensor:
    """[B, S] int64: counting upwards from anywhere. Any data will do that `step` can find again."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    first = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    return (first + torch.arange(LENGTH)) % VOCABULARY


def train(coordinator: str, site: str) -> None:
    """One rank of a site; under torchrun one of several."""
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    model: nn.Module = Bigrams()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    bundle = os.environ.get("LOCO_BUNDLE")
    said = "nothing left to train"  # where the run is finished already
    with loco.join(
        coordinator, site=site, model=model, optimizer=optimizer, bundle=bundle
    ) as outer:
        while not outer.finished:
            loss = model(batch(outer.data_cursor, rank))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            outer.step(tokens=BATCH * LENGTH, loss=loss.item())
            said = f"loss {loss.item():.3f}"
    print(f"site {site} rank {rank}: round {outer.round}, {said}")


if __name__ == "__main__":
    if sys.argv[1] == "parameters":
        torch.manual_seed(0)
        loco.save_parameters(Bigrams(), sys.argv[2])
    else:
        train(*sys.argv[2:4])
        if dist.is_initialized():
            gc.collect()  # DDP held the group: its threads must end before the interpreter does
            dist.destroy_process_group()
