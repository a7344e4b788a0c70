"""SCAPE as its equations state it, replicated and in NumPy: what Scape is compared with.

Every rank holds a dense m (or v) and a dense residual r_i; one mean over the ranks of the values
on the mask (docs/scape.md, "The equations"). No shards of state, no carry, no wire.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Oracle:
    """All ranks of a site at once. `slices`: positions [m] int of every sparse slice."""

    p: np.ndarray  # [n] fp32
    ranks: int
    owner_of: np.ndarray  # [n] int
    slices: list[np.ndarray]
    second_moment: str
    b1: float
    b2: float
    eps: float = 1e-8
    weight_decay: float = 0.0
    density: float = 0.1
    density_ramp_steps: int = 0
    refresh: int = 1
    delay: int = 0
    exclude_in_flight: bool = False
    max_grad_norm: float | None = None
    t: int = 0
    mask: np.ndarray | None = None  # [n] bool
    following: np.ndarray | None = None
    norm: float = 0.0
    m: np.ndarray = field(init=False)
    v: np.ndarray = field(init=False)
    r: np.ndarray = field(init=False)  # [ranks, n]

    def __post_init__(self) -> None:
        n = self.p.size
        self.m, self.v = np.zeros(n, np.float32), np.zeros(n, np.float32)
        self.r = np.zeros((self.ranks, n), np.float32)

    def step(self, g: np.ndarray, lr: float, used: np.ndarray) -> None:
        """One step with the gradients of all ranks, g [ranks, n], on the mask `used` [n] bool.

        Scores may tie up to rounding (at the first step |g| / sqrt(g^2) is 1 everywhere), so the
        mask is the implementation's, after a check that it is a top-k of the scores here.
        """
        self.t += 1
        b1, b2 = self.b1, self.b2
        c = b1 * self.m + (1 - b1) * g + self.r  # [ranks, n]
        scores = np.abs(self._owned(c))
        if self.second_moment == "local":
            self.v = b2 * self.v + (1 - b2) * (self._owned(g) ** 2 + self.eps**2)
            scores = scores**2 / self.v
        self._follow(scores, used)
        mean = np.where(used, c.mean(0), 0)
        self.r = np.where(used, 0, c)
        gbar = np.where(used, (mean - b1 * self.m) / (1 - b1), 0)
        self.norm = float(np.linalg.norm(gbar))
        if self.max_grad_norm is not None and self.norm > self.max_grad_norm:
            gbar = gbar * (self.max_grad_norm / self.norm)
        previous, self.m = self.m, np.where(used, b1 * self.m + (1 - b1) * gbar, 0)
        local = self.second_moment == "local"
        v = self.v if local else b2 * previous**2 + (1 - b2) * gbar**2
        update = self.m / (1 - b1**self.t) / (np.sqrt(v / (1 - b2**self.t)) + self.eps)
        if local:
            update = np.clip(update, -((1 - b2) ** -0.5), (1 - b2) ** -0.5)
        self.p = self.p * (1 - lr * self.weight_decay) - lr * np.where(used, update, 0)

    def _owned(self, by_rank: np.ndarray) -> np.ndarray:
        """What the owner of each position has, [n] of [ranks, n]."""
        return np.take_along_axis(by_rank, self.owner_of[None], 0)[0]

    def _follow(self, scores: np.ndarray, used: np.ndarray) -> None:
        """Check that `used` is the mask that the options call for."""
        due = (self.t - 1) % self.refresh == 0
        if self.delay == 0:
            if due:
                self.check_top(scores, used)
            else:
                assert (used == self.mask).all()
            self.mask = used
            return
        if self.following is not None:
            self.check_top(self.following, used)
        elif self.mask is not None:
            assert (used == self.mask).all()
        else:
            self.check_top(scores, used)
        excluding = np.where(used, -1, scores) if self.exclude_in_flight else scores
        self.mask, self.following = used, excluding if due else None
        self.due_density = self.current_density()

    def current_density(self) -> float:
        done = self.t - 1
        if done >= self.density_ramp_steps:
            return self.density
        return self.density ** (done / self.density_ramp_steps)

    def check_top(self, scores: np.ndarray, used: np.ndarray) -> None:
        """`used` keeps exactly k of every slice, none below one that it leaves out."""
        first = self.t == 1 or self.delay == 0
        density = self.current_density() if first else self.due_density
        for positions in self.slices:
            on = used[positions]
            assert on.sum() == max(1, round(density * positions.size))
            if not on.all():
                least, left = scores[positions[on]].min(), scores[positions[~on]].max()
                assert least >= left - 1e-4 * abs(left)
