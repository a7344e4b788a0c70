"""AdamS (arXiv 2505.16363): Adam whose second moment comes from the previous first moment.

    v_t = b2 m_{t-1}^2 + (1 - b2) g_t^2
    m_t = b1 m_{t-1} + (1 - b1) g_t
    p   = p (1 - lr wd) - lr (m_t / bc1) / (sqrt(v_t / bc2) + eps)

with bc = 1 - b^t, or 1 where `bias_correction` is off. The only state is m: 4 bytes a parameter.
Beware of gradients that are exactly zero: m and sqrt(v) then shrink together, and the step stays at
b1 / sqrt(b2) of lr (0.92 by default) until m reaches eps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from loco.errors import ConfigError


class AdamS(torch.optim.Optimizer):
    """AdamS on dense gradients, with torch's foreach kernels.

    Args:
        lr: learning rate, >= 0; may be set in `param_groups` between steps.
        betas: decay of the first moment and weight of its square in the second, each in [0, 1).
        eps: added to the denominator, > 0.
        weight_decay: decoupled, as in AdamW; >= 0.
        bias_correction: divide m and v by 1 - beta^t; off is the form of the paper.

    Raises:
        ConfigError: an argument out of range, or a sparse or complex gradient.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
        }
        check_hyperparameters(defaults)
        super().__init__(params, defaults)
        for group in self.param_groups:
            check_hyperparameters(group)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. A closure is not supported."""
        assert closure is None
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._step_group(group, params)

    def _step_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
        grads = [p.grad for p in params if p.grad is not None]
        for grad in grads:
            if grad.layout != torch.strided or grad.is_complex():
                raise ConfigError(
                    f"AdamS got a gradient with layout {grad.layout} and dtype {grad.dtype}, shape "
                    f"{tuple(grad.shape)}; it needs dense real gradients (nn.Embedding(sparse="
                    f"False))"
                )
        states = [self.state[p] for p in params]
        for state, p in zip(states, params, strict=True):
            if not state:
                state["step"] = 0
                state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["step"] += 1
        # Parameters that joined later have a bias correction of their own.
        for step in sorted({state["step"] for state in states}):
            rows = [i for i, state in enumerate(states) if state["step"] == step]
            adams_update(
                [params[i] for i in rows],
                [grads[i] for i in rows],
                [states[i]["exp_avg"] for i in rows],
                group,
                step,
            )


def adams_update(
    params: list[Tensor],
    grads: list[Tensor],
    moments: list[Tensor],
    group: dict[str, Any],
    step: int,
) -> None:
    """Apply one AdamS step to lists of equally shaped tensors, in place; `step` counts from 1."""
    b1, b2 = group["betas"]
    denominators = torch._foreach_mul(moments, moments)
    torch._foreach_mul_(denominators, b2)
    torch._foreach_addcmul_(denominators, grads, grads, value=1 - b2)
    torch._foreach_lerp_(moments, grads, 1 - b1)
    bc1, bc2 = bias_corrections(group, step)
    torch._foreach_sqrt_(denominators)
    # lr (m / bc1) / (sqrt(v / bc2) + eps) with the constants folded into lr and eps.
    torch._foreach_add_(denominators, group["eps"] * math.sqrt(bc2))
    if group["weight_decay"] != 0:
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
    scale = group["lr"] * math.sqrt(bc2) / bc1
    torch._foreach_addcdiv_(params, moments, denominators, value=-scale)


def bias_corrections(group: dict[str, Any], step: int) -> tuple[float, float]:
    """1 - beta^step for both betas, or ones where the group wants no correction."""
    if not group["bias_correction"]:
        return 1.0, 1.0
    b1, b2 = group["betas"]
    return 1 - b1**step, 1 - b2**step


def check_hyperparameters(group: dict[str, Any]) -> None:
    """Raise ConfigError for the first hyper-parameter of `group` that is out of range."""
    b1, b2 = group["betas"]
    checks: Iterable[tuple[str, Any, bool, str]] = (
        ("lr", group["lr"], group["lr"] >= 0, ">= 0"),
        ("betas[0]", b1, 0 <= b1 < 1, "in [0, 1)"),
        ("betas[1]", b2, 0 <= b2 < 1, "in [0, 1)"),
        ("eps", group["eps"], group["eps"] > 0, "> 0"),
        ("weight_decay", group["weight_decay"], group["weight_decay"] >= 0, ">= 0"),
    )
    for name, value, good, allowed in checks:
        if not good:
            raise ConfigError(f"{name} is {value}; it must be {allowed}")
