"""Who makes the inner steps of a site: what the rounds need of them, whoever they are.

`worker.trainer` is loco's own loop; `worker.guest` lets a user's loop make the steps.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from loco.errors import NonFiniteError
from loco.wire.v1 import coordinator_pb2 as pb
from worker.site import Site


@dataclass(frozen=True, kw_only=True)
class Local:
    """What a site has done since the last exchange; sums over its ranks."""

    inner_steps: int
    tokens: int
    train_bits_per_byte: float | None
    """None where nobody measures it."""


class Observed(Protocol):
    """What the rounds want to know and keep of an inner optimizer."""

    skipped_steps: int
    last_grad_norm: float
    """Before clipping; not finite where nobody measures it, or the step was skipped."""

    def state_dict(self) -> dict[str, Any]:
        """State of this rank, for the site's checkpoint."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it."""
        ...


class Trainee(ABC):
    """The site's replica of the model and those who train it; all ranks call it alike."""

    model: nn.Module
    optimizer: Observed

    def __init__(self, site: Site, name: str) -> None:
        self._site = site
        self._name = name
        self.data_cursor = 0
        """Inner steps of this site since the run's start: its position in its data."""
        self._local_steps = 0
        self._nats = self._weight = 0.0
        self._seconds, self._timed_steps = 0.0, 0
        self.seconds_a_step = 0.0
        """Mean over the inner steps of the last round; 0 before there is one."""

    def train(self, num_steps: int, plan: pb.RoundPlan) -> None:
        """Make inner steps, and measure their time."""
        started = time.monotonic()
        self._train(num_steps, plan)
        self._seconds += time.monotonic() - started
        self._timed_steps += num_steps

    @property
    @abstractmethod
    def in_site_bytes(self) -> int:
        """Bytes that this rank has handed to collectives with the other ranks of its site."""

    @property
    @abstractmethod
    def mask_density(self) -> float:
        """Share of the gradient's positions that the ranks exchange in an inner step."""

    @abstractmethod
    def _train(self, num_steps: int, plan: pb.RoundPlan) -> None:
        """Make inner steps; `_count` each."""

    @abstractmethod
    def measure(self) -> Local:
        """What was done since the last exchange.

        Raises:
            NonFiniteError: the loss was NaN or infinite, on every rank alike.
        """

    @property
    @abstractmethod
    def evaluates(self) -> bool:
        """Whether `evaluate` can tell anything."""

    @abstractmethod
    def evaluate(self) -> float:
        """Bits per byte of the current parameters on held-out data."""

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
        if self._timed_steps:
            self.seconds_a_step = self._seconds / self._timed_steps
        self._seconds, self._timed_steps = 0.0, 0
        self._local_steps, self._nats, self._weight = 0, 0.0, 0.0

    def _count(self, nats: float, weight: float) -> None:
        """A step is made: `nats` is the sum of its loss over `weight` average ranks."""
        self._nats += nats
        self._weight += weight
        self._local_steps += 1
        self.data_cursor += 1

    def _mean_loss(self) -> float:
        """Nats over ranks and steps since the last exchange; NonFiniteError if not finite."""
        steps = self._local_steps
        mean = self.local_nats() / steps
        if not math.isfinite(mean):
            raise NonFiniteError(
                f"site {self._name!r}: the training loss of the last {steps} inner steps is "
                f"{mean}; nothing of them was sent. Lower inner.lr, check the data, and start "
                "again: the coordinator holds the last round"
            )
        return mean
