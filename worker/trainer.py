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
        self._all_held_out = held_out
        self._local_steps = 0
        self._nats = self._weight = 0.0
        self.divided()

    def divided(self) -> None:
        """The site's rank or number of ranks is another now: take its part of the data."""
        site = self._site
        self._stream.split(site.rank, site.num_ranks)
        self._share = self._stream.rows * site.num_ranks / self._config.data.batch
        """Rows of this rank over those of an average one: what its gradient weighs."""
        self._held_out = self._all_held_out[site.rank :: site.num_ranks]

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
            self._inner_step(lr_at(self._config.inner, step, plan.total_steps))

    @property
    def local_steps(self) -> int:
        """Inner steps since the last exchange."""
        return self._local_steps

    def local_nats(self) -> float:
        """Sum of the site's training losses since the last exchange, of the ranks that are here."""
        total, weight = self._site.sum(self._nats, self._weight)
        return total / weight * self._local_steps if weight else 0.0

    def go_on(self, local_steps: int, local_nats: float) -> None:
        """Take over the count of an earlier life; the parameters are the caller's matter."""
        self._local_steps, self._nats, self._weight = local_steps, local_nats, local_steps

    def join_in(self, local_steps: int, data_cursor: int) -> None:
        """Take over the place of other ranks, without their losses: they report those."""
        self._local_steps, self.data_cursor = local_steps, data_cursor
        self._nats = self._weight = 0.0

    def drop_local_steps(self) -> None:
        """Theta is replaced: what was done since the last exchange is gone, its data come again."""
        self.data_cursor -= self._local_steps
        self.start_count()

    def start_count(self) -> None:
        """An exchange takes what was done until now."""
        self._local_steps, self._nats, self._weight = 0, 0.0, 0.0

    def measure(self) -> Local:
        """What was done since the last exchange.

        Raises:
            NonFiniteError: the loss was NaN or infinite, on every rank alike.
        """
        steps = self._local_steps
        mean = self.local_nats() / steps
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

    def _inner_step(self, lr: float) -> None:
        """One step of all ranks; without effect if MembersChanged is raised on the way."""
        self._site.begin()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        inputs, targets = self._stream.batch(self.data_cursor)
        self.optimizer.zero_grad()
        loss = self.model(inputs.to(self._site.device), targets.to(self._site.device))
        (loss if self._share == 1 else loss * self._share).backward()
        staged, nats = self.optimizer.stage(), float(loss.detach())
        self._site.commit_step(self.optimizer, staged, lambda: self._count(nats))

    def _count(self, nats: float) -> None:
        """A step is committed."""
        self._nats += nats * self._share
        self._weight += self._share
        self._local_steps += 1
        self.data_cursor += 1

    def evaluate(self) -> float:
        """Bits per byte of the current parameters on the held-out text."""
        nats, num_tokens = evaluate(self.model, self._held_out.to(self._site.device))
        total_nats, total_tokens = self._site.sum(nats, num_tokens)
        return bits_per_byte(total_nats, total_tokens * self._held_out_bytes_per_token)
