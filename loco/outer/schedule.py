"""Schedules of the outer loop: pure functions of the round."""

from __future__ import annotations

import math

from loco.config import CodecConfig, OuterConfig


def k_at(codec: CodecConfig, round_: int) -> int:
    """Values kept a chunk in this round: geometric from `k_start` to `k` over `k_ramp_rounds`.

    The first rounds are denser because error feedback starts empty (time constant 1 / (1 - beta)
    rounds) while theta moves fastest.
    """
    if codec.k_start is None or round_ >= codec.k_ramp_rounds:
        return codec.k
    exponent = round_ / codec.k_ramp_rounds
    return round(codec.k_start * math.pow(codec.k / codec.k_start, exponent))


def alpha_at(outer: OuterConfig, round_: int) -> float:
    """Outer learning rate in this round: that of the last step of `alpha_steps` reached."""
    reached = [first for first in outer.alpha_steps if first <= round_]
    return outer.alpha_steps[max(reached)] if reached else outer.alpha
