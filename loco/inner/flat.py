"""One flat fp32 buffer for all gradients, with every `p.grad` a view into it.

Backward then accumulates straight into the buffer that is exchanged: no copies, and micro-batches
add up locally. Code that sets `p.grad` to None (`model.zero_grad()`) still works: its new gradients
are copied into the buffer before the exchange.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from loco.errors import ConfigError


def trainable(param_groups: list[dict[str, Any]]) -> list[tuple[str, Tensor]]:
    """The parameters with `requires_grad`, once each, in the order of the groups.

    Returns:
        (name, parameter) pairs; the name is `group G parameter I` where the optimizer was built
        from parameters without names.

    Raises:
        ConfigError: none is trainable, or one is not a dense fp32 tensor on the common device.
    """
    named = []
    for g, group in enumerate(param_groups):
        params = group["params"]
        names = group.get("param_names") or [f"group {g} parameter {i}" for i in range(len(params))]
        named += [(n, p) for n, p in zip(names, params, strict=True) if p.requires_grad]
    if not named:
        raise ConfigError("no parameter requires a gradient; there is nothing to train")
    for name, p in named:
        _check_parameter(name, p, named[0][1].device)
    return named


def _check_parameter(name: str, p: Tensor, device: torch.device) -> None:
    if p.dtype != torch.float32:
        raise ConfigError(
            f"{name} has dtype {p.dtype}; the inner optimizers need torch.float32 parameters: keep "
            f"fp32 masters and compute in bf16 under torch.autocast"
        )
    if p.layout != torch.strided or type(p.data) is not Tensor:
        raise ConfigError(
            f"{name} is a {type(p.data).__name__} with layout {p.layout}; the parameters must be "
            f"plain dense tensors, replicated on every rank (no FSDP, no DTensor)"
        )
    if p.device != device:
        raise ConfigError(
            f"{name} is on {p.device}, others are on {device}; put the whole model on one device"
        )


def describe(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """One line for each parameter, for `groups.require_equal`."""
    return [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in named]


class FlatGradients:
    """The gradients of `named` parameters as one tensor, `flat`: [n] fp32."""

    def __init__(self, named: list[tuple[str, Tensor]]) -> None:
        self._named = named
        self.flat = named[0][1].new_zeros(sum(p.numel() for _, p in named))
        sizes = [p.numel() for _, p in named]
        parts = torch.split(self.flat, sizes)
        self._views = [part.view(p.shape) for part, (_, p) in zip(parts, named, strict=True)]
        self.collect()

    def zero(self) -> None:
        """Zero the buffer and make every `p.grad` its view again."""
        self.flat.zero_()
        for (_, p), view in zip(self._named, self._views, strict=True):
            p.grad = view

    @torch.no_grad()
    def collect(self) -> None:
        """Bring every gradient into the buffer; a parameter without one counts as zero.

        Raises:
            ConfigError: a gradient is sparse; names the parameter.
        """
        for (name, p), view in zip(self._named, self._views, strict=True):
            if p.grad is view:
                continue
            if p.grad is None:
                view.zero_()
            elif p.grad.layout != torch.strided:
                raise ConfigError(
                    f"the gradient of {name} has layout {p.grad.layout}; sparse gradients are not "
                    f"supported, use nn.Embedding(sparse=False)"
                )
            else:
                view.copy_(p.grad)
            p.grad = view
