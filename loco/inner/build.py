"""From the config's `[inner]` to an optimizer, and its learning rate at any inner step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from loco.config import InnerConfig
from loco.inner.adams import AdamS
from loco.inner.base import InnerOptimizer
from loco.inner.dense import DenseSync
from loco.inner.groups import Group
from loco.inner.muon import Muon, hidden_matrices
from loco.inner.scape import Scape


def build_inner(config: InnerConfig, model: nn.Module, group: Group) -> InnerOptimizer:
    """The inner optimizer of one rank; matrices decay, norms and biases do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    if config.sync == "scape":
        return _scape(config, groups, group)
    optimizer: torch.optim.Optimizer
    if config.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, lr=config.lr)
    elif config.optimizer == "adams":
        optimizer = AdamS(groups, lr=config.lr, betas=config.betas)
    elif config.optimizer == "muon":
        optimizer = _muon(config, groups, hidden_matrices(model))
    else:
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, foreach=True)
    return DenseSync(optimizer, group=group, max_grad_norm=config.max_grad_norm or None)


def _muon(config: InnerConfig, groups: list[dict[str, Any]], hidden: set[nn.Parameter]) -> Muon:
    matrices, norms = groups
    others = matrices | {"params": [p for p in matrices["params"] if p not in hidden]}
    return Muon(
        [p for p in matrices["params"] if p in hidden],
        [others, norms],
        lr=config.lr,
        weight_decay=config.weight_decay,
        betas=config.betas,
    )


def _scape(config: InnerConfig, groups: list[dict[str, Any]], group: Group) -> Scape:
    # With the local second moment error feedback plays the part of momentum.
    momentum = 0.0 if config.second_moment == "local" else config.betas[0]
    return Scape(
        groups,
        lr=config.lr,
        betas=(momentum, config.betas[1]),
        second_moment=config.second_moment,
        max_grad_norm=config.max_grad_norm or None,
        density=config.density,
        density_ramp_steps=config.density_ramp_steps,
        refresh=config.refresh,
        delay=config.delay,
        exclude_in_flight=config.exclude_in_flight,
        wire_dtype=getattr(torch, config.wire_dtype),
        group=group,
    )


def lr_at(config: InnerConfig, step: int, total_steps: int) -> float:
    """Learning rate at a global inner step: linear warm-up, then cosine to the minimum.

    A pure function of the step: a site that restarts or joins late has the lr of the others.
    """
    if step < config.warmup_steps:
        return config.lr * ((step + 1) / config.warmup_steps)  # never above lr by a rounding
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.lr * (config.min_lr_fraction + (1 - config.min_lr_fraction) * cosine)
