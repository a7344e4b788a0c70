"""Dense gradient averaging inside a site around any torch optimizer: the control for SCAPE."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from loco.errors import ConfigError
from loco.inner.flat import FlatGradients, describe, trainable
from loco.inner.groups import Group, require_equal
from loco.inner.moving import Change, Held


class DenseSync:
    """Average the gradients of all ranks, clip, and step `optimizer`, equally on every rank.

    The model is replicated, without DistributedDataParallel: call `backward` on each micro-batch
    and `step` once. One all-reduce of all gradients in fp32 moves 8 n (N-1)/N bytes a rank for n
    parameters and N ranks. A parameter that no rank used has a zero gradient.

    Args:
        optimizer: built over the parameters of the replicated model, in the same order on all
            ranks. Frozen parameters are left alone.
        group: the ranks; None is the default process group, or this process alone.
        max_grad_norm: clip the averaged gradient to this norm, > 0; None does not clip.

    On failure of a rank, `step` raises before the optimizer has moved anything.

    Raises:
        ConfigError: an argument out of range, parameters that are not dense fp32, or ranks whose
            models differ (the message names the first parameter that does).
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        group: Group | dist.ProcessGroup | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        check_max_grad_norm(max_grad_norm)
        named = [item for items in trainable(optimizer.param_groups) for item in items]
        self.optimizer = optimizer
        self.group = Group.of(group)
        self.max_grad_norm = max_grad_norm
        self.skipped_steps = 0
        self.last_grad_norm = 0.0
        require_equal(self.group, describe(named), named[0][1].device)
        self._gradients = FlatGradients(named)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sent in collectives since construction."""
        return self.group.bytes_sent

    def step(self) -> None:
        """Average, clip, update. If a gradient is not finite on any rank, all skip the step."""
        self.commit(self.stage())

    @torch.no_grad()
    def stage(self) -> bool:
        """Average and clip the gradients; parameters and state stay as they are.

        Returns:
            Whether they are finite, on all ranks alike: what `commit` needs.
        """
        self._gradients.collect()
        flat = self._gradients.flat  # [n] fp32
        self.group.all_reduce_sum(flat)
        flat /= self.group.size
        # The all-reduced buffer is bit-equal on all ranks, so all decide the same way: a NaN or an
        # infinity of one rank survives the sum.
        self.last_grad_norm = float(torch.linalg.vector_norm(flat))
        if not math.isfinite(self.last_grad_norm):
            return False
        if self.max_grad_norm is not None and self.last_grad_norm > self.max_grad_norm:
            flat *= self.max_grad_norm / self.last_grad_norm
        return True

    def settle(self, staged: bool) -> bool:
        """Nothing of a staged step is on its way."""
        return staged

    @torch.no_grad()
    def commit(self, staged: bool) -> None:
        """Update with the averaged gradients, or count a step that all ranks skip."""
        if staged:
            self.optimizer.step()
        else:
            self.skipped_steps += 1

    def zero_grad(self) -> None:
        """Zero the gradient buffer in place."""
        self._gradients.zero()

    def state_dict(self) -> dict[str, Any]:
        """State of the wrapped optimizer, equal on all ranks, and the count of skipped steps."""
        return {"optimizer": self.optimizer.state_dict(), "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, on any number of ranks."""
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.skipped_steps = state_dict["skipped_steps"]

    # All of it is equal on all ranks, so nothing is lost with one, and nothing has to move.
    common_state = state_dict
    load_common_state = load_state_dict

    def held(self) -> None:
        """No rank has anything alone."""

    def held_after(self, staged: bool) -> None:
        """No rank has anything alone."""

    def held_in(self, state: dict[str, Any]) -> None:
        """No rank has anything alone."""

    def move(self, group: Group, change: Change, held: dict[int, Held]) -> dict[str, Any]:  # noqa: ARG002
        """This rank's state in another group: nothing that the others would have to give."""
        return {}

    def regroup(self, group: Group, state: dict[str, Any]) -> None:  # noqa: ARG002
        """Go on in another group."""
        self.group = group


def check_max_grad_norm(max_grad_norm: float | None) -> None:
    """Raise ConfigError unless `max_grad_norm` is None or positive."""
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ConfigError(
            f"max_grad_norm is {max_grad_norm}; it must be > 0, or None for no clipping"
        )
