"""Schedules of the outer loop: pure functions of the round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from loco.outer.fragments import FragmentRules


class Density(Protocol):
    """`[codec]` of the config, which this package does not import: that reads files."""

    @property
    def k(self) -> int: ...
    @property
    def k_start(self) -> int | None: ...
    @property
    def k_ramp_rounds(self) -> int: ...
    @property
    def k_end(self) -> int | None: ...
    @property
    def k_end_rounds(self) -> int: ...


def k_at(codec: Density, round_: int, num_rounds: int) -> int:
    """Values kept a chunk in this round of a run of `num_rounds`.

    Geometric from `k_start` to `k` over `k_ramp_rounds`: the first rounds are denser because error
    feedback starts empty (time constant 1 / (1 - beta) rounds) while theta moves fastest. Then `k`,
    and `k_end` in the last `k_end_rounds`, in which sites hand over what their replicas still keep.
    """
    if codec.k_end is not None and round_ >= num_rounds - codec.k_end_rounds:
        return codec.k_end
    if codec.k_start is None or round_ >= codec.k_ramp_rounds:
        return codec.k
    exponent = round_ / codec.k_ramp_rounds
    return round(codec.k_start * math.pow(codec.k / codec.k_start, exponent))


def k_of_site(k: int, k_sites: int, num_sites: int) -> int:
    """Values that a site keeps of a chunk where `num_sites` take part in the round.

    Up to `k_sites` sites send k each; more sites share what so many would send, so that the union
    of their positions, and with it the update, stays as small (docs/results/downlink_*.md).
    """
    return max(1, round(k * min(1.0, k_sites / num_sites)))


GUESS_AFTER_STEPS = 1
"""Inner steps of a delay that a site makes before it goes on from its guess of the update: behind
them its contribution is encoded, which shows the guess. A shorter delay has no guess."""


def own_step(rules: FragmentRules, alpha: float, momentum: float, num_sites: int) -> float:
    """By how much of its own values a site may expect an update to move theta; 0: no guess.

    Where it alone sends a coordinate `mean_contributors` gives it all of alpha, `mean` its share,
    and `nesterov` its share once more by the momentum that it adds.
    """
    if rules.bits == 32:
        return 0.0
    if rules.aggregation == "nesterov":
        return alpha * (1 + momentum) / num_sites
    return alpha / num_sites if rules.aggregation == "mean" else alpha


class Alpha(Protocol):
    """`[outer]` of the config, likewise."""

    @property
    def alpha(self) -> float: ...
    @property
    def alpha_steps(self) -> Mapping[int, float]: ...


def alpha_at(outer: Alpha, round_: int) -> float:
    """Outer learning rate in this round: that of the last step of `alpha_steps` reached."""
    reached = [first for first in outer.alpha_steps if first <= round_]
    return outer.alpha_steps[max(reached)] if reached else outer.alpha
