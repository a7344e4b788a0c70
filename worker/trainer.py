"""Inner steps: the model, its data and its optimizer inside one site."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from loco.config import Config
from loco.data import DataStream, bits_per_byte, evaluate, load_tokens, validation_windows
from loco.errors import NonFiniteError
from loco.inner.build import build_inner, lr_at
from loco.model import build_model
from worker.site import Site


@dataclass(frozen=True, kw_only=True)
class RoundStats:
    """Sums over the ranks of a site, for one round."""

    tokens: int
    inner_steps: int
    train_bits_per_byte: float


class Trainer:
    """Trains the site's replica of the model; every rank has one and calls it alike."""

    def __init__(self, config: Config, site: Site, name: str, corpus: str) -> None:
        self._config = config
        self._site = site
        self._name = name
        self.model = build_model(config.model, seed=config.run.seed).to(site.device)
        self._optimizer = build_inner(config.inner, self.model, site.group)
        self._stream = DataStream(
            load_tokens(corpus, "train"),
            seq_len=config.model.seq_len,
            batch=config.data.batch,
            seed=config.run.seed,
            site=name,
            rank=site.rank,
            world=site.num_ranks,
        )
        held_out = validation_windows(
            load_tokens(config.data.corpus, "validation"),
            seq_len=config.model.seq_len,
            count=config.eval.sequences,
        )
        self._held_out = held_out[site.rank :: site.num_ranks]

    @property
    def in_site_bytes(self) -> int:
        """Bytes that this rank has handed to collectives with the other ranks of its site."""
        return self._site.group.bytes_sent

    def train_round(self, round_: int) -> RoundStats:
        """H inner steps. The step's number alone decides data and lr, so nothing else is state.

        Raises:
            NonFiniteError: the loss is NaN or infinite, on every rank alike.
        """
        steps = self._config.inner.steps
        nats = torch.zeros((), dtype=torch.float64)
        for step in range(round_ * steps, (round_ + 1) * steps):
            nats += self._inner_step(step)
        (total,) = self._site.sum(float(nats))
        mean = total / (steps * self._site.num_ranks)
        if not math.isfinite(mean):
            raise NonFiniteError(
                f"site {self._name!r}: the training loss of round {round_} is {mean}; nothing of "
                "it was sent. Lower inner.lr, check the data, and start again from the last round"
            )
        return RoundStats(
            tokens=steps * self._config.data.batch * self._config.model.seq_len,
            inner_steps=steps,
            train_bits_per_byte=mean / math.log(2),
        )

    def _inner_step(self, step: int) -> float:
        lr = lr_at(self._config.inner, step, self._config.total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        inputs, targets = self._stream.batch(step)
        self._optimizer.zero_grad()
        with self._autocast():
            loss = self.model(inputs.to(self._site.device), targets.to(self._site.device))
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())

    def evaluate(self) -> float:
        """Bits per byte of the current parameters on the held-out text."""
        with self._autocast():
            nats, num_bytes = evaluate(self.model, self._held_out.to(self._site.device))
        total_nats, total_bytes = self._site.sum(nats, num_bytes)
        return bits_per_byte(total_nats, int(total_bytes))

    def _autocast(self) -> torch.autocast:
        dtype = getattr(torch, self._config.model.dtype)
        enabled = dtype is not torch.float32
        return torch.autocast(self._site.device.type, dtype=dtype, enabled=enabled)
