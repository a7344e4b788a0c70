"""Inner steps: the model, its data and its optimizer inside one site."""

from __future__ import annotations

import math
from dataclasses import dataclass

from loco.config import Config
from loco.data import (
    DataStream,
    Weighted,
    bits_per_byte,
    bytes_per_token,
    check_vocabulary,
    evaluate,
    load_parts,
    load_tokens,
    validation_windows,
)
from loco.errors import NonFiniteError
from loco.inner import Scape
from loco.inner.build import build_inner, lr_at
from loco.model import build_model
from loco.wire.v1 import coordinator_pb2 as pb
from worker.site import Site


@dataclass(frozen=True, kw_only=True)
class Local:
    """What a site has done since the last exchange; sums over its ranks."""

    inner_steps: int
    tokens: int
    train_bits_per_byte: float


class Trainer:
    """Trains the site's replica of the model; every rank has one and calls it alike."""

    def __init__(self, config: Config, site: Site, name: str, corpus: str) -> None:
        self._config = config
        self._site = site
        self._name = name
        self.model = build_model(config.model, seed=config.run.seed).to(site.device)
        self.optimizer = build_inner(config.inner, self.model, site.group)
        parts = load_parts(corpus, "train")
        validation = load_tokens(config.data.corpus, "validation")
        check_vocabulary([*parts, Weighted(tokens=validation)], self.model.vocab_size)
        self._train_bytes_per_token = bytes_per_token(parts)
        self._held_out_bytes_per_token = validation.bytes_per_token
        self._stream = DataStream(
            parts,
            seq_len=config.model.seq_len,
            batch=config.data.batch,
            seed=config.run.seed,
            site=name,
            rank=site.rank,
            world=site.num_ranks,
        )
        held_out = validation_windows(
            validation,
            seq_len=config.model.seq_len,
            count=config.eval.sequences,
        )
        self.data_cursor = 0
        """Inner steps of this site since the run's start: its position in its data."""
        self._local_steps = 0
        self._nats = 0.0
        self._held_out = held_out[site.rank :: site.num_ranks]

    @property
    def in_site_bytes(self) -> int:
        """Bytes that this rank has handed to collectives with the other ranks of its site."""
        return self._site.group.bytes_sent

    @property
    def mask_density(self) -> float:
        """Share of the gradient's positions that the ranks exchange in an inner step."""
        return self.optimizer.current_density() if isinstance(self.optimizer, Scape) else 1.0

    def train(self, num_steps: int, plan: pb.RoundPlan) -> None:
        """Inner steps; the learning rate follows the run's steps, the data this site's own."""
        for _ in range(num_steps):
            step = min(plan.first_step + self._local_steps, plan.total_steps - 1)
            self._nats += self._inner_step(lr_at(self._config.inner, step, plan.total_steps))
            self._local_steps += 1
            self.data_cursor += 1

    @property
    def local_steps(self) -> int:
        """Inner steps since the last exchange."""
        return self._local_steps

    @property
    def local_nats(self) -> float:
        """Sum of this rank's training losses since the last exchange."""
        return self._nats

    def go_on(self, local_steps: int, local_nats: float) -> None:
        """Take over the count of an earlier life; the parameters are the caller's matter."""
        self._local_steps, self._nats = local_steps, local_nats

    def drop_local_steps(self) -> None:
        """Theta is replaced: what was done since the last exchange is gone, its data come again."""
        self.data_cursor -= self._local_steps
        self._local_steps, self._nats = 0, 0.0

    def exchanged(self) -> Local:
        """Begin a new count; returns what was done since the last exchange.

        Raises:
            NonFiniteError: the loss was NaN or infinite, on every rank alike.
        """
        steps, nats = self._local_steps, self._nats
        self._local_steps, self._nats = 0, 0.0
        (total,) = self._site.sum(nats)
        mean = total / (steps * self._site.num_ranks)
        if not math.isfinite(mean):
            raise NonFiniteError(
                f"site {self._name!r}: the training loss of the last {steps} inner steps is "
                f"{mean}; nothing of them was sent. Lower inner.lr, check the data, and start "
                "again: the coordinator holds the last round"
            )
        return Local(
            inner_steps=steps,
            tokens=steps * self._config.data.batch * self._config.model.seq_len,
            train_bits_per_byte=bits_per_byte(mean, self._train_bytes_per_token),
        )

    def _inner_step(self, lr: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        inputs, targets = self._stream.batch(self.data_cursor)
        self.optimizer.zero_grad()
        loss = self.model(inputs.to(self._site.device), targets.to(self._site.device))
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def evaluate(self) -> float:
        """Bits per byte of the current parameters on the held-out text."""
        nats, num_tokens = evaluate(self.model, self._held_out.to(self._site.device))
        total_nats, total_tokens = self._site.sum(nats, num_tokens)
        return bits_per_byte(total_nats, total_tokens * self._held_out_bytes_per_token)
