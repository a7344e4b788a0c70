"""What an owner does with the averaged values of its shard: two second moments, one interface.

`LocalOwner` (preset `default`) exchanges accumulated gradients and divides by a second moment that
each owner keeps of its own gradients, dense and without communication. Error feedback plays the
part of momentum. `MomentumOwner` (preset `paper`) is SCAPE with AdamS: it exchanges accumulated
first moments, and the second moment comes from the previous first moment.

Both are used in the same way in a step: `prepare` once, `scores` if a mask is chosen, `propose`,
then `direction` and `commit` if no rank objects. Until `commit` nothing has changed.

Legend: S positions of the shard, k of them on the mask; t counts applied steps from 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from loco.inner.shards import Shard


class Owner(ABC):
    """State of one shard and the update that it makes.

    Args:
        shard: the positions owned, S of them.
        betas, eps: as in Scape.
        like: a tensor of the device to live on.
    """

    gradient_weight: float
    """What a new gradient weighs in the values that are accumulated and exchanged."""

    def __init__(self, shard: Shard, betas: tuple[float, float], eps: float, like: Tensor) -> None:
        self.shard = shard
        self.betas = betas
        self.eps = eps
        self.buffer = like.new_zeros(shard.length)
        """The state that a checkpoint needs, [S] fp32."""
        self.support = torch.empty(0, dtype=torch.int64, device=like.device)
        """The shard's positions of the last mask that was applied, [k] int64."""

    @abstractmethod
    def prepare(self, gradient: Tensor, step: int) -> None:
        """Begin applied step `step` with this rank's own flat gradient, [n]."""

    @abstractmethod
    def scores(self, accumulated: Tensor) -> Tensor:
        """How much each sparse position wants to be sent, from what this rank accumulated there.

        Both [at most S] fp32, not negative; `accumulated` is overwritten by the result.
        """

    @abstractmethod
    def propose(self, own: Tensor, averaged: Tensor) -> Tensor:
        """The gradient [k] that the mean values `averaged` at positions `own` stand for."""

    @abstractmethod
    def direction(self, scale: float) -> Tensor:
        """What lr multiplies, [k], with the proposed gradient scaled by `scale` (clipping)."""

    @abstractmethod
    def staged(self) -> Tensor:
        """What `buffer` will be after `commit`, as a copy, [S]."""

    @abstractmethod
    def commit(self) -> None:
        """Keep the proposed state."""


class LocalOwner(Owner):
    """v_t = b2 v_{t-1} + (1-b2) (g_own^2 + eps^2) on all S;  direction = gbar / sqrt(v_t / bc2).

    The score, accumulated^2 / v_t, orders as the size of the direction does, so that what would
    move the parameters most is sent first. `buffer` is v; with eps inside it is never zero.

    Directions are limited to 1 / sqrt(1-b2), the largest step that Adam itself can make. Without
    a limit they reached 160 on embedding rows that the owner had not met for a while (v decays,
    the others' gradients pile up); 99.9 % are below 9, and the limit costs no loss (lab log).
    """

    gradient_weight = 1.0

    def __init__(self, shard: Shard, betas: tuple[float, float], eps: float, like: Tensor) -> None:
        super().__init__(shard, betas, eps, like)
        self._moment = torch.empty_like(self.buffer)
        """v of the step in preparation; trades places with `buffer` at commit."""
        self._floor = like.new_tensor((1 - betas[1]) * eps**2)

    def prepare(self, gradient: Tensor, step: int) -> None:
        b2 = self.betas[1]
        self._correction = 1 - b2**step
        torch.add(self._floor, self.buffer, alpha=b2, out=self._moment)
        parts = zip(
            self.shard.local_parts(self._moment), self.shard.flat_parts(gradient), strict=True
        )
        for moment, g in parts:
            moment.addcmul_(g, g, value=1 - b2)

    def scores(self, accumulated: Tensor) -> Tensor:
        return accumulated.square_().div_(self._moment[: accumulated.numel()])

    def propose(self, own: Tensor, averaged: Tensor) -> Tensor:
        self._own = own
        self._gradient = averaged
        return averaged

    def direction(self, scale: float) -> Tensor:
        limit = (1 - self.betas[1]) ** -0.5
        moment = self._moment.index_select(0, self._own)
        direction = (self._gradient * scale).div_(moment.div_(self._correction).sqrt_())
        return direction.clamp_(-limit, limit)

    def staged(self) -> Tensor:
        return self._moment.clone()

    def commit(self) -> None:
        self.buffer, self._moment = self._moment, self.buffer
        self.support = self._own


class MomentumOwner(Owner):
    """AdamS on the mask (arXiv 2505.16363), with the owner's carry off it.

        base = b1 m + h                    m is zero off the last mask, h is zero on it
        m'   = averaged + base   on M      h' = base off M
        gbar = (m' - b1 m) / (1-b1)        clipped: m' = b1 m + (1-b1) gbar
        v    = b2 m^2 + (1-b2) gbar^2;     direction = (m' / bc1) / (sqrt(v / bc2) + eps)

    m and h are never both non-zero, so `buffer` holds their sum, and `support` tells which it is.
    """

    def __init__(
        self,
        shard: Shard,
        betas: tuple[float, float],
        eps: float,
        like: Tensor,
        bias_correction: bool = True,
    ) -> None:
        super().__init__(shard, betas, eps, like)
        self.gradient_weight = 1 - betas[0]
        self._bias_correction = bias_correction

    def prepare(self, gradient: Tensor, step: int) -> None:  # noqa: ARG002 (LocalOwner's need)
        b1, b2 = self.betas
        corrected = self._bias_correction
        self._corrections = (1 - b1**step, 1 - b2**step) if corrected else (1.0, 1.0)

    def scores(self, accumulated: Tensor) -> Tensor:
        return accumulated.add_(self._decayed()[: accumulated.numel()]).abs_()

    def propose(self, own: Tensor, averaged: Tensor) -> Tensor:
        b1 = self.betas[0]
        if own is self.support:
            previous = self.buffer.index_select(0, own)
            base = previous * b1
        else:
            momentum = torch.zeros_like(self.buffer)
            momentum[self.support] = self.buffer[self.support]
            previous = momentum[own]
            base = self._decayed()[own]
        self._own = own
        self._previous = previous
        self._gradient = (averaged + base - previous * b1).div_(1 - b1)
        return self._gradient

    def direction(self, scale: float) -> Tensor:
        b1, b2 = self.betas
        bc1, bc2 = self._corrections
        gradient = self._gradient * scale
        self._momentum = self._previous * b1 + gradient * (1 - b1)
        moment = self._previous.square().mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        return (self._momentum / bc1).div_((moment / bc2).sqrt_().add_(self.eps))

    def staged(self) -> Tensor:
        buffer = self._decayed()
        buffer[self._own] = self._momentum
        return buffer

    def commit(self) -> None:
        self.buffer[self.support] *= self.betas[0]
        self.buffer[self._own] = self._momentum
        self.support = self._own

    def _decayed(self) -> Tensor:
        decayed = self.buffer.clone()
        decayed[self.support] *= self.betas[0]
        return decayed
