"""Flat fp32 buffers for gradients and parameters; the model's tensors become views into them.

Backward then accumulates straight into the buffer that is exchanged: no copies, and micro-batches
add up locally. Code that sets `p.grad` to None (`model.zero_grad()`) still works: its new gradients
are copied into the buffer before the exchange. No address ever changes, so captured CUDA graphs of
forward and backward stay valid.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from loco.errors import ConfigError

Named = list[tuple[str, Tensor]]


def trainable(param_groups: list[dict[str, Any]]) -> list[Named]:
    """The parameters with `requires_grad` of each group, in order.

    Returns:
        (name, parameter) pairs; the name is `group G parameter I` where the optimizer was built
        from parameters without names.

    Raises:
        ConfigError: none is trainable, or one is not a dense fp32 tensor on the common device, or
            two different parameters share memory.
    """
    by_group: list[Named] = []
    for g, group in enumerate(param_groups):
        params = group["params"]
        names = group.get("param_names") or [f"group {g} parameter {i}" for i in range(len(params))]
        by_group.append([(n, p) for n, p in zip(names, params, strict=True) if p.requires_grad])
    named = [item for items in by_group for item in items]
    if not named:
        raise ConfigError("no parameter requires a gradient; there is nothing to train")
    for name, p in named:
        _check_parameter(name, p, named[0][1].device)
    _check_apart(named)
    return by_group


def _check_apart(named: Named) -> None:
    ranges = sorted((p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in named if p.nbytes)
    for (_, stop, before), (start, _, name) in pairwise(ranges):
        if start < stop:
            raise ConfigError(
                f"{before} and {name} are two parameters that share memory; tie weights by using "
                f"one torch.nn.Parameter in both places"
            )


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


def describe(named: Named) -> list[str]:
    """One line for each parameter, for `groups.require_equal`."""
    return [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in named]


class FlatGradients:
    """The gradients of `named` parameters as one tensor, `flat`: [n] fp32."""

    def __init__(self, named: Named) -> None:
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


class FlatParameters:
    """The `named` parameters as one tensor, `flat`: [n] fp32; the model's become views of it."""

    def __init__(self, named: Named) -> None:
        self._named = named
        self.flat = torch.cat([p.detach().reshape(-1) for _, p in named])
        parts = torch.split(self.flat, [p.numel() for _, p in named])
        for part, (_, p) in zip(parts, named, strict=True):
            p.data = part.view(p.shape)
        self._addresses = [p.data_ptr() for _, p in named]

    def require_in_place(self) -> None:
        """Check that the model still uses the buffer.

        Raises:
            ConfigError: the storage of a parameter was replaced; names it.
        """
        for (name, p), address in zip(self._named, self._addresses, strict=True):
            if p.data_ptr() != address:
                raise ConfigError(
                    f"the storage of {name} was replaced after the optimizer was built (model.to, "
                    f"load_state_dict(assign=True), p.data = ...); build the optimizer afterwards, "
                    f"or write values with copy_"
                )
