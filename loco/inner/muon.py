"""Muon for hidden matrices, AdamW for all other parameters, as one optimizer.

Muon: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; the scale of
its step: Liu et al., arXiv 2502.16982, section 2.2; inside DiLoCo: MuLoCo, arXiv 2505.23725.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
RMS_OF_ADAMW = 0.2
"""Root mean square of an AdamW step over its rate: with it a rate found for AdamW serves Muon."""


class Muon(torch.optim.Optimizer):
    """One rate for both: a Muon step is as large as AdamW's would be.

    torch.optim.Muon takes matrices alone, and orthogonalises in bf16 on every device: on a CPU
    without bf16 units tens of times slower than fp32 (docs/lab-log.md).

    Args:
        matrices: fp32 parameters [rows, columns] that are orthogonalised.
        groups: all other parameters, as AdamW takes them.
        lr: peak learning rate, > 0.
        weight_decay: of `matrices`, decoupled; >= 0. `groups` have theirs.
        betas: of AdamW.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        groups: list[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
    ) -> None:
        self._adamw = torch.optim.AdamW(groups, lr=lr, betas=betas, foreach=True)
        hidden = {"params": list(matrices), "lr": lr, "weight_decay": weight_decay, "muon": True}
        super().__init__([hidden, *self._adamw.param_groups], {"muon": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "a training loop of loco's computes the gradient first"
        for group in self.param_groups:
            if group["muon"]:
                self._step_matrices(group)
        # Loading a state dict makes new groups and a new state.
        self._adamw.param_groups = [group for group in self.param_groups if not group["muon"]]
        self._adamw.state = self.state
        self._adamw.step()

    def _step_matrices(self, group: dict[str, Any]) -> None:
        alike: dict[torch.Size, list[nn.Parameter]] = {}
        for p in group["params"]:
            if p.grad is not None:
                alike.setdefault(p.shape, []).append(p)
        for shape, params in alike.items():
            directions = orthogonal(torch.stack([self._momentum(p) for p in params]))
            step = group["lr"] * RMS_OF_ADAMW * max(shape) ** 0.5
            for p, direction in zip(params, directions, strict=True):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(direction, alpha=step)

    def _momentum(self, p: nn.Parameter) -> Tensor:
        """Nesterov's: what the gradient adds is in it twice."""
        assert p.grad is not None
        state = self.state[p]
        if not state:
            state["momentum"] = torch.zeros_like(p)
        state["momentum"].lerp_(p.grad, 1 - MOMENTUM)
        return p.grad.lerp(state["momentum"], MOMENTUM)


def orthogonal(matrices: Tensor) -> Tensor:
    """Each matrix with its singular values brought near 1: five Newton-Schulz steps.

    Args:
        matrices: [num, rows, columns] fp32. Orthogonalised in bf16 on a GPU, in fp32 elsewhere.

    Returns:
        [num, rows, columns] fp32, singular values between about 0.7 and 1.2; zeros stay zeros.
    """
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices  # [num, r, c], r <= c
    x = x.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)  # singular values at most 1
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT  # [num, r, r]
        x = a * x + (b * gram + c * gram @ gram) @ x
    directions: Tensor = x.mT if tall else x
    return directions.to(matrices.dtype)


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """The trained matrices that are neither an embedding nor the head: what Muon is for."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    head = getattr(model, "head", None)  # of loco.model's
    ends = {module.weight for module in (*tables, head) if module is not None}
    return {p for p in model.parameters() if p.requires_grad and p.ndim == 2 and p not in ends}
