"""A user's own training loop as the one that makes a site's inner steps.

The rounds run in a thread of their own, exactly as in `loco worker`, and the two threads hand the
word to each other: while the user's loop makes an inner step the rounds wait, and while the rounds
exchange the loop waits in `Outer.step`. So there is never more than one at the model, and
collectives of both keep their order on every rank.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from loco.errors import ConfigError
from loco.inner import Scape
from loco.wire.v1 import coordinator_pb2 as pb
from worker.loop import Worker
from worker.site import Site
from worker.trainee import Local, Observed, Trainee


class Left(Exception):  # noqa: N818  # the user's wish, not an error
    """The user's loop makes no further step."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """An inner step that this rank has made."""

    tokens: int
    loss: float | None


class Baton:
    """Who has the word: the rounds, or the user's loop."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._wanted = False
        self._made: Made | None = None
        self._left = False
        self._over = False
        self._error: BaseException | None = None

    # --- the rounds -----------------------------------------------------------------------------

    def await_step(self) -> Made:
        """Let the user's loop make one inner step; Left if it never will."""
        with self._changed:
            self._wanted = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._made is not None or self._left)
            self._wanted = False
            if self._made is None:
                raise Left
            made, self._made = self._made, None
            return made

    def end(self, error: BaseException | None) -> None:
        """There are no further rounds; `error` is the reason, if it is one."""
        with self._changed:
            self._over, self._error = True, error
            self._changed.notify_all()

    # --- the user's loop ------------------------------------------------------------------------

    def give(self, made: Made) -> None:
        """Hand over a step that was wanted."""
        with self._changed:
            self._made, self._wanted = made, False
            self._changed.notify_all()

    def await_word(self) -> bool:
        """Whether another step is wanted; raises what ended the rounds, once."""
        with self._changed:
            self._changed.wait_for(lambda: self._wanted or self._over)
            error, self._error = self._error, None
            if error is not None:
                raise error
            return self._wanted

    @property
    def has_left(self) -> bool:
        return self._left

    def leave(self) -> None:
        """The rounds get no further step."""
        with self._changed:
            self._left = True
            self._changed.notify_all()


class UsersOptimizer:
    """State of a user's optimizer for the site's checkpoint; it is never stepped from here."""

    skipped_steps = 0
    last_grad_norm = math.nan

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Equal on all ranks, as under DistributedDataParallel."""
        return {"optimizer": self._optimizer.state_dict() if self._optimizer else {}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it; learning rates stay those that the user has set."""
        if self._optimizer is None:
            return
        rates = [group["lr"] for group in self._optimizer.param_groups]
        try:
            self._optimizer.load_state_dict(state_dict["optimizer"])
        except (ValueError, KeyError) as error:
            kind = type(self._optimizer).__name__
            raise ConfigError(
                f"the optimizer in the site's checkpoint does not fit this {kind} ({error}): give "
                "an optimizer of the same kind over the same parameters, or another checkpoint "
                "directory"
            ) from error
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


class Guest(Trainee):
    """The user's model, whose inner steps come through a baton."""

    def __init__(
        self,
        site: Site,
        name: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        baton: Baton,
        evaluate: Callable[[], float] | None,
    ) -> None:
        super().__init__(site, name)
        self.model = model
        self.optimizer: Observed = (
            optimizer if isinstance(optimizer, Scape) else UsersOptimizer(optimizer)
        )
        self._baton = baton
        self._evaluate = evaluate
        self._tokens = 0

    @property
    def in_site_bytes(self) -> int:
        return self.optimizer.bytes_sent if isinstance(self.optimizer, Scape) else 0

    @property
    def mask_density(self) -> float:
        return self.optimizer.current_density() if isinstance(self.optimizer, Scape) else 1.0

    def _train(self, num_steps: int, plan: pb.RoundPlan) -> None:  # noqa: ARG002 (lr is the user's)
        for _ in range(num_steps):
            made = self._baton.await_step()
            self._tokens += made.tokens
            if made.loss is None:
                self._count(0.0, 0.0)
            else:
                self._count(made.loss, 1.0)

    def measure(self) -> Local:
        tokens, known = self._site.sum(self._tokens, self._weight)
        return Local(
            inner_steps=self.local_steps,
            tokens=int(tokens),
            train_bits_per_byte=self._mean_loss() / math.log(2) if known else None,
        )

    def start_count(self) -> None:
        super().start_count()
        self._tokens = 0

    @property
    def evaluates(self) -> bool:
        return self._evaluate is not None

    def evaluate(self) -> float:
        assert self._evaluate is not None
        return self._evaluate()


class GuestWorker(Worker):
    """The rounds of a site whose inner steps a user's loop makes."""

    make_guest: Callable[[], Guest]
    baton: Baton
    _asks = False
    """Waits for what comes next; equal on all ranks."""

    @property
    def round(self) -> int:
        """Outer round of theta."""
        return self._exchange.round

    def _make_trainer(self) -> Trainee:
        return self.make_guest()

    def _live(self) -> None:
        self._rounds(self._enter())
        self._exchange.write_theta()  # replicas may hold what is in nobody's theta

    def _next_directive(self) -> pb.WaitRoundResponse:
        self._asks = True
        try:
            return super()._next_directive()
        finally:
            self._asks = False

    def _step_meanwhile(self, away: bool) -> bool:
        """Who leaves does not wait for other sites first, nor for a coordinator that is away."""
        if self._asks or away:
            (left,) = self._site.sum(float(self.baton.has_left))
            if left:
                raise Left
        return super()._step_meanwhile(away)
