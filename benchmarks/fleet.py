"""Many simulated sites trained as one: every parameter of their models is one tensor, site first.

A model of a million parameters and a batch of a few hundred tokens leave a core half idle when
sites take turns; as batched products twenty of them take little more than half the time. The
equations are those of `SimulatedSite`; sums have another order, so results agree up to rounding.
The sites of several runs, too: they need only make the same number of steps with the same rates.
Shape suffixes: R sites, T tokens (sequences times positions), D model width, and those of
`loco.model.llama`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from benchmarks.simulation import Round, SimulatedSite, Simulation, total_steps
from loco.config import Config
from loco.inner.build import lr_at
from loco.model.llama import NORM_EPS, rotary_tables, rotate


class Lockstep:
    """A simulation whose inner steps somebody else makes."""

    def __init__(self, simulation: Simulation, label: dict[str, Any]) -> None:
        self.simulation = simulation
        self.label = label
        self.rounds: list[Round] = []
        """Those that are over."""
        self._life = simulation.life()
        self.over = False
        self.due = 0
        """Inner steps until something else happens."""
        self.go_on(0)

    def go_on(self, steps: int) -> None:
        """So many inner steps are made."""
        self.due -= steps
        while not self.due and not self.over:
            happens: int | Round | None = next(self._life, None)
            self.over = happens is None
            self.due = happens if isinstance(happens, int) else 0
            if isinstance(happens, Round):
                self.rounds.append(happens)


def train(runs: list[Lockstep]) -> None:
    """All runs to their end; they share schedules, and differ in when and what they exchange."""
    sites = [site for run in runs for site in run.simulation.sites]
    fleet = Fleet(runs[0].simulation.config, sites)
    while going := [run for run in runs if not run.over]:
        steps = min(run.due for run in going)
        fleet.train(steps)
        for run in going:
            run.go_on(steps)


class Fleet:
    """The replicas of all sites, and their optimizers' state; dense AdamW inside the sites."""

    def __init__(self, config: Config, sites: list[SimulatedSite]) -> None:
        assert config.inner.sync == "dense"
        assert config.inner.optimizer == "adamw"
        assert config.model.tie_embeddings
        self._config = config
        self._sites = sites
        self._rotary = rotary_tables(config.model)
        self._step = 0
        self._p: dict[str, Tensor] = {}  # [R, ...]
        for name, _ in sites[0].model.named_parameters():
            stacked = torch.stack([site.model.get_parameter(name).data for site in sites])
            self._p[name] = stacked.requires_grad_()
            for site, own in zip(sites, stacked.detach(), strict=True):
                site.model.get_parameter(name).data = own  # what a site writes, the fleet reads
        inner = config.inner
        matrices = [p for p in self._p.values() if p.ndim > 2]
        norms = [p for p in self._p.values() if p.ndim == 2]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": inner.weight_decay},
                {"params": norms, "weight_decay": 0.0},
            ],
            lr=inner.lr,
            betas=inner.betas,
            fused=True,
        )

    def train(self, num_steps: int) -> None:
        """The next inner steps of all sites."""
        for step in range(self._step, self._step + num_steps):
            for group in self._optimizer.param_groups:
                group["lr"] = lr_at(self._config.inner, step, total_steps(self._config))
            batches = [site.batch(step) for site in self._sites]
            inputs, targets = (torch.stack(part) for part in zip(*batches, strict=True))
            loss_R = self._loss(inputs, targets)
            self._optimizer.zero_grad()
            loss_R.sum().backward()
            self._clip()
            self._optimizer.step()
            for site, nats in zip(self._sites, loss_R.tolist(), strict=True):
                site.note(nats)
        self._step += num_steps

    @torch.no_grad()
    def _clip(self) -> None:
        """Each site's gradient to its own norm."""
        if not self._config.inner.max_grad_norm:
            return
        gradients = [p.grad for p in self._p.values() if p.grad is not None]
        squares = torch.stack([g.flatten(1).square().sum(1) for g in gradients])
        scale_R = (self._config.inner.max_grad_norm / squares.sum(0).sqrt()).clamp(max=1.0)
        for g in gradients:
            g.mul_(scale_R.view(-1, *[1] * (g.ndim - 1)))

    def _loss(self, tokens_RBS: Tensor, targets_RBS: Tensor) -> Tensor:  # [R] nats
        sites, batch, length = tokens_RBS.shape
        each = torch.arange(sites)[:, None]
        x_RTD = self._p["embed_tokens.weight"][each, tokens_RBS.flatten(1)]
        for layer in range(self._config.model.num_layers):
            name = f"layers.{layer}"
            normed = self._norm(x_RTD, f"{name}.input_layernorm")
            x_RTD = x_RTD + self._attention(normed, f"{name}.self_attn", (batch, length))
            normed = self._norm(x_RTD, f"{name}.post_attention_layernorm")
            x_RTD = x_RTD + self._swiglu(normed, f"{name}.mlp")
        logits_RTV = self._linear(self._norm(x_RTD, "norm"), "embed_tokens")
        nats = F.cross_entropy(logits_RTV.flatten(0, 1), targets_RBS.flatten(), reduction="none")
        return nats.view(sites, -1).mean(1)

    def _attention(self, x_RTD: Tensor, name: str, shape: tuple[int, int]) -> Tensor:
        batch, length = shape
        model = self._config.model
        width = model.dim // model.num_heads
        cos, sin = (table[:length] for table in self._rotary)

        def heads(part: str) -> Tensor:  # [R * B, H, S, E]
            flat = self._linear(x_RTD, f"{name}.{part}")
            return flat.view(-1, length, flat.shape[-1] // width, width).transpose(1, 2)

        y = F.scaled_dot_product_attention(
            rotate(heads("q_proj"), cos, sin),
            rotate(heads("k_proj"), cos, sin),
            heads("v_proj"),
            is_causal=True,
            enable_gqa=model.num_kv_heads != model.num_heads,
        )
        y_RTD = y.transpose(1, 2).reshape(x_RTD.shape[0], batch * length, -1)
        return self._linear(y_RTD, f"{name}.o_proj")

    def _swiglu(self, x_RTD: Tensor, name: str) -> Tensor:
        gate, up = (self._linear(x_RTD, f"{name}.{part}") for part in ("gate_proj", "up_proj"))
        return self._linear(F.silu(gate) * up, f"{name}.down_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return torch.bmm(x, self._p[f"{name}.weight"].transpose(1, 2))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], None, NORM_EPS) * self._p[f"{name}.weight"][:, None]
