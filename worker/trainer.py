"""Inner steps: the model, its data and its optimizer inside one site."""

from __future__ import annotations

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
from loco.errors import DataError
from loco.inner import InnerOptimizer, Scape
from loco.inner.build import build_inner, lr_at
from loco.model import build_model
from loco.tokens import Tokens, one_tokenizer
from loco.wire.v1 import coordinator_pb2 as pb
from worker.site import Site
from worker.trainee import Local, Trainee


class Trainer(Trainee):
    """Trains the site's replica of the model; every rank has one and calls it alike."""

    def __init__(self, config: Config, site: Site, name: str, corpus: str) -> None:
        super().__init__(site, name)
        self._config = config
        self.model = build_model(config.model, seed=config.run.seed).to(site.device)
        self.optimizer: InnerOptimizer = build_inner(config.inner, self.model, site.group)
        parts = load_parts(corpus, "train")
        validation = _held_out_text(config.data.corpus)
        _check_tokenizer(
            config.data.tokenizer_digest, [*(part.tokens for part in parts), validation]
        )
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
        self._all_held_out = held_out
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
        return self._site.group.bytes_sent

    @property
    def mask_density(self) -> float:
        return self.optimizer.current_density() if isinstance(self.optimizer, Scape) else 1.0

    def _train(self, num_steps: int, plan: pb.RoundPlan) -> None:
        """Inner steps; the learning rate follows the run's steps, the data this site's own."""
        for _ in range(num_steps):
            step = min(plan.first_step + self._local_steps, plan.total_steps - 1)
            self._inner_step(lr_at(self._config.inner, step, plan.total_steps))

    def measure(self) -> Local:
        mean = self._mean_loss()
        return Local(
            inner_steps=self.local_steps,
            tokens=self.local_steps * self._config.data.batch * self._config.model.seq_len,
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
        weight = self._share
        self._site.commit_step(self.optimizer, staged, lambda: self._count(nats * weight, weight))

    @property
    def evaluates(self) -> bool:
        return True

    def evaluate(self) -> float:
        nats, num_tokens = evaluate(self.model, self._held_out.to(self._site.device))
        total_nats, total_tokens = self._site.sum(nats, num_tokens)
        return bits_per_byte(total_nats, total_tokens * self._held_out_bytes_per_token)


def _held_out_text(corpus: str) -> Tokens:
    """DataError says what the run's corpus is needed for at a site that trains on another."""
    try:
        return load_tokens(corpus, "validation")
    except DataError as error:
        raise DataError(
            f"every site measures validation on data.corpus, whatever it trains on: {error}"
        ) from error


def _check_tokenizer(stated: str | None, corpora: list[Tokens]) -> None:
    """DataError where what the run states, the site's corpora and its validation text differ."""
    run = [] if stated is None else [("the run (data.tokenizer_digest)", stated)]
    one_tokenizer([*run, *((tokens.corpus, tokens.tokenizer) for tokens in corpora)])
