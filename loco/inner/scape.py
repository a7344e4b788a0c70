"""SCAPE (arXiv 2607.01678): sparse synchronisation of the ranks of one site, sharded by owner.

Every rank accumulates in q what it has not yet sent. A step, with owner o of each position and the
weight w of a new gradient (1 with the second moment `local`, 1 - b1 with `momentum`):

    a_i   = q_i + w g_i                      on every rank i
    M     = top-k of the owner's score        per slice (see shards.py), gathered as bits
    out   = mean_i a_i[M]                     all-to-all of k values, summed by the owner
    p[M] -= lr direction(out)                 k directions gathered; off M only weight decay
    q_i   = a_i off M; on M what rounding for the wire left over

Equal on every rank, bit for bit, because all apply the same gathered bytes. Direction and score are
the owner's matter (owner.py). docs/scape.md explains the presets and what was measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from loco.errors import ConfigError
from loco.inner.adams import check_hyperparameters
from loco.inner.dense import check_max_grad_norm
from loco.inner.flat import FlatGradients, FlatParameters, describe, trainable
from loco.inner.groups import Group, require_equal
from loco.inner.mask import Mask, MaskGathering, mask_from_marks, select
from loco.inner.moving import Change, Held, gather_held
from loco.inner.owner import LocalOwner, MomentumOwner, Owner
from loco.inner.shards import is_sparse, make_regions, make_shards

EQUAL_OPTIONS = (
    "betas",
    "eps",
    "second_moment",
    "max_grad_norm",
    "density",
    "density_ramp_steps",
    "refresh",
    "delay",
    "exclude_in_flight",
    "wire_dtype",
)
"""Options in which ranks must not differ, beside the parameters themselves."""


@dataclass(frozen=True)
class StagedStep:
    """Everything that a step will do, computed and exchanged but not yet applied."""

    mask: Mask
    next_mask: MaskGathering | Mask | None
    leftover: Tensor  # [K] fp32: what rounding for the wire left of each sent value
    changes: Tensor  # [K] fp32: what is added to the parameters on the mask


class Scape(torch.optim.Optimizer):
    """Sparse synchronisation and optimizer of a replicated model, as one torch optimizer.

    Every rank of the group builds it over the same parameters in the same order and calls
    `backward` (any number of micro-batches), then `step`, then `zero_grad`. Parameters become views
    of one flat buffer, as their gradients do; do not replace their storage afterwards. Tensors with
    fewer than two dimensions are exchanged densely.

    Args:
        params: parameters, named parameters or groups; a group may set `lr` and `weight_decay`.
        lr: learning rate, >= 0.
        betas: weight of the momentum (0 with `local`), and of the past in the second moment.
        eps: keeps the denominator from zero, >= 1e-15.
        weight_decay: decoupled, >= 0.
        second_moment: `local`: the owner's running mean of its own squared gradients; `momentum`:
            AdamS, from the previous first moment.
        bias_correction: with `momentum` only: divide both moments by 1 - beta^t.
        max_grad_norm: clip the exchanged gradient to this norm, > 0; None does not clip.
        density: share of the positions exchanged in a step, in (0, 1].
        density_ramp_steps: steps over which the density falls geometrically from 1 to `density`.
        refresh: steps that a mask is used for, >= 1.
        delay: 0: a mask serves from the step that chose it; 1: from the next one, so that its
            gather overlaps the next forward and backward.
        exclude_in_flight: with `delay=1`: a next mask leaves out what this step sends.
        wire_dtype: torch.bfloat16 or torch.float32, for values and directions. Error feedback keeps
            what rounding takes from the values.
        group: the ranks; None is the default process group, or this process alone.

    On failure of a rank, `step` raises and nothing of that step has been applied on this rank.

    Raises:
        ConfigError: an argument out of range, parameters that are not dense fp32, or ranks whose
            models differ (names the first parameter that does).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        betas: tuple[float, float] = (0.0, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        second_moment: str = "local",
        bias_correction: bool = True,
        max_grad_norm: float | None = None,
        density: float = 0.1,
        density_ramp_steps: int = 0,
        refresh: int = 1,
        delay: int = 0,
        exclude_in_flight: bool = False,
        wire_dtype: torch.dtype = torch.bfloat16,
        group: Group | dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        _check_options(
            betas,
            eps,
            second_moment,
            density,
            density_ramp_steps,
            refresh,
            delay,
            exclude_in_flight,
            wire_dtype,
        )
        check_max_grad_norm(max_grad_norm)
        for param_group in self.param_groups:
            check_hyperparameters({**param_group, "betas": betas, "eps": eps})
        self.betas = betas
        self.eps = eps
        self.second_moment = second_moment
        self.max_grad_norm = max_grad_norm
        self.density = density
        self.density_ramp_steps = density_ramp_steps
        self.refresh = refresh
        self.delay = delay
        self.exclude_in_flight = exclude_in_flight
        self.wire_dtype = wire_dtype
        self.group = Group.of(group)
        self.skipped_steps = 0
        self.last_grad_norm = 0.0
        self._applied_steps = 0
        self._mask: Mask | None = None
        self._next_mask: MaskGathering | Mask | None = None
        self._bias_correction = bias_correction
        self._lay_out()
        self._divide()

    def _divide(self) -> None:
        """Cut the flat vector into the shards of the group's ranks, and own this rank's, zeroed."""
        self._shards = make_shards(self._regions, self.group.size)
        self._shard = self._shards[self.group.rank]
        # Allocated once: on a CPU, page faults of fresh buffers cost more than the arithmetic.
        self._scratch = self._residual.new_empty(self._shard.length)
        self._owner: Owner
        arguments = (self._shard, self.betas, self.eps, self._residual)
        if self.second_moment == "local":
            self._owner = LocalOwner(*arguments)
        else:
            self._owner = MomentumOwner(*arguments, self._bias_correction)

    def _lay_out(self) -> None:
        """Move the parameters into one flat buffer, and check that all ranks agree."""
        by_group = trainable(self.param_groups)
        named = [
            item
            for sparse in (True, False)
            for items in by_group
            for item in items
            if is_sparse(item[1]) == sparse
        ]
        lines = [f"{name}={getattr(self, name)}" for name in EQUAL_OPTIONS]
        for index, items in enumerate(by_group):
            lines += [f"{line} in group {index}" for line in describe(items)]
        require_equal(self.group, lines, named[0][1].device)
        self._sizes = [[(p.numel(), is_sparse(p)) for _, p in items] for items in by_group]
        self._regions = make_regions(self._sizes)
        self._parameters = FlatParameters(named)
        self._gradients = FlatGradients(named)
        self._residual = torch.zeros_like(self._gradients.flat)  # q: [n] fp32

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while the optimizer is built: the layout is fixed afterwards."""
        if hasattr(self, "_owner"):
            raise ConfigError(
                "Scape cannot take another parameter group after it was built; give it all groups "
                "at once"
            )
        super().add_param_group(param_group)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sent in collectives since construction."""
        return self.group.bytes_sent

    @property
    def applied_steps(self) -> int:
        """Steps applied so far, skipped ones not counted; the density follows it."""
        return self._applied_steps

    def current_density(self) -> float:
        """The share of positions that a mask chosen now would keep."""
        if self._applied_steps >= self.density_ramp_steps:
            return self.density
        return float(self.density ** (self._applied_steps / self.density_ramp_steps))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Exchange and apply one step, or skip it on all ranks if one has no finite gradient.

        The gradients stay as they are; call `zero_grad` before the next backward.
        """
        assert closure is None
        self.commit(self.stage())

    def zero_grad(self, set_to_none: bool = False) -> None:  # noqa: ARG002 (torch's signature)
        """Zero the gradient buffer in place. The buffer stays, whatever `set_to_none` says."""
        self._gradients.zero()

    @torch.no_grad()
    def stage(self) -> StagedStep | None:
        """Compute and exchange a step without applying it; drop the result to give it up.

        Returns:
            What `commit` needs, or None, on all ranks alike, if the step has to be skipped.
        """
        self._parameters.require_in_place()
        self._gradients.collect()
        gradient = self._gradients.flat  # [n]
        self._owner.prepare(gradient, self._applied_steps + 1)
        mask, next_mask = self._masks()
        values = self._residual.index_select(0, mask.positions)  # [K]: a_i on the mask
        fresh = gradient.index_select(0, mask.positions)
        values.add_(fresh, alpha=self._owner.gradient_weight)
        # Off the mask a NaN would hide in q for a while. 0 x NaN and 0 x infinity are NaN, so this
        # makes all that is sent not finite if any part of this rank's gradient is not.
        values += 0 * torch.linalg.vector_norm(gradient)
        wire = values.to(self.wire_dtype)
        received = self.group.all_to_all(wire, mask.counts)  # [size, k]
        own = mask.locals[self.group.rank]
        scale = self._clip_scale(self._owner.propose(own, received.float().mean(0)))
        if scale is None:
            return None
        changes = self._changes(mask, self._owner.direction(scale))
        return StagedStep(mask, next_mask, values.sub_(wire), changes)

    def settle(self, staged: StagedStep | None) -> StagedStep | None:
        """The same, once the next mask has arrived: waiting for it can fail, a commit must not."""
        if staged is None or staged.next_mask is None:
            return staged
        return replace(staged, next_mask=_arrived(staged.next_mask))

    @torch.no_grad()
    def commit(self, staged: StagedStep | None) -> None:
        """Apply a staged step, or count one that all ranks skip.

        It needs no other rank, so it cannot fail on some of them only.
        """
        if staged is None:
            self.skipped_steps += 1
            return
        self._residual.add_(self._gradients.flat, alpha=self._owner.gradient_weight)
        self._residual.index_copy_(0, staged.mask.positions, staged.leftover)
        self._owner.commit()
        for region in self._regions:
            group = self.param_groups[region.group]
            if group["weight_decay"] != 0:
                part = self._parameters.flat[region.start : region.stop]
                part *= 1 - group["lr"] * group["weight_decay"]
        self._parameters.flat.index_add_(0, staged.mask.positions, staged.changes)
        self._mask, self._next_mask = staged.mask, staged.next_mask
        self._applied_steps += 1

    def _masks(self) -> tuple[Mask, MaskGathering | None]:
        """The mask of this step, and the one on its way for the next if that is another."""
        due = self._applied_steps % self.refresh == 0
        if self.delay == 0:
            if due or self._mask is None:
                return self._choose(None).wait(), None
            return self._mask, None
        if self._next_mask is not None:
            mask = _arrived(self._next_mask)
        else:
            mask = self._mask or self._choose(None).wait()
        return mask, self._choose(mask) if due else None

    def _choose(self, in_flight: Mask | None) -> MaskGathering:
        """Choose a mask from what has accumulated until now, and start to gather it."""
        shard, density = self._shard, self.current_density()
        residual, gradient = self._residual, self._gradients.flat
        parts = (shard.flat_parts(residual), shard.flat_parts(gradient))
        for q, g, sum_ in zip(*parts, shard.local_parts(self._scratch), strict=True):
            torch.add(q, g, alpha=self._owner.gradient_weight, out=sum_)
        scores = self._owner.scores(self._scratch[: shard.sparse_length])
        if in_flight is not None and self.exclude_in_flight:
            own = in_flight.locals[self.group.rank]
            scores[own[: own.numel() - (shard.length - shard.sparse_length)]] = -1
        return MaskGathering(self.group, self._shards, select(scores, shard, density), density)

    def _clip_scale(self, proposed: Tensor) -> float | None:
        """What the proposed gradient is multiplied by, or None if it is not finite anywhere."""
        total = torch.linalg.vector_norm(proposed).square().view(1)
        self.group.all_reduce_sum(total)
        norm = self.last_grad_norm = math.sqrt(total) if total >= 0 else math.nan
        if not math.isfinite(norm):
            return None
        if self.max_grad_norm is None or norm <= self.max_grad_norm:
            return 1.0
        return self.max_grad_norm / norm

    def _changes(self, mask: Mask, direction: Tensor) -> Tensor:
        """Gather what is added to the parameters on the mask, [K] fp32, from the owners' [k]."""
        for part, piece in self._shard.split(mask.locals[self.group.rank]):
            direction[part] *= -self.param_groups[piece.region.group]["lr"]
        padded = direction.new_zeros(max(mask.counts), dtype=self.wire_dtype)
        padded[: direction.numel()] = direction
        rows = self.group.all_gather(padded).wait()
        # The owner too applies what it sent, not what it computed: replicas stay bit-equal.
        return torch.cat([row[:k] for row, k in zip(rows, mask.counts, strict=True)]).float()

    def state_dict(self) -> dict[str, Any]:
        """State of this rank, as copies: hand those of all ranks to `loco.inner.reshard`.

        Returns:
            `param_groups` without parameters, and `state`: `residual` [n] fp32, `owner` [S] fp32,
            `mask` and `next_mask` [n] bool or None, counters, and the layout they belong to.
        """
        n = self._residual.numel()
        following = None if self._next_mask is None else _arrived(self._next_mask)
        return {
            "param_groups": [
                {k: v for k, v in group.items() if k not in ("params", "param_names")}
                for group in self.param_groups
            ],
            "state": {
                "second_moment": self.second_moment,
                "rank": self.group.rank,
                "size": self.group.size,
                "sizes_by_group": self._sizes,
                "applied_steps": self._applied_steps,
                "skipped_steps": self.skipped_steps,
                "residual": self._residual.clone(),
                "owner": self._owner.buffer.clone(),
                "mask": None if self._mask is None else self._mask.marks(n),
                "next_mask": None if following is None else following.marks(n),
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank of equally many, bit for bit.

        Raises:
            ConfigError: the state belongs to another rank, number of ranks, model or second moment.
        """
        state = state_dict["state"]
        for key, own in self._identity().items():
            if state[key] != own:
                raise ConfigError(
                    f"this state of Scape was saved with {key} = {state[key]}, here it is {own}; "
                    f"for another number of ranks pass the states of all ranks to "
                    f"loco.inner.reshard, else use the model and options it was saved with"
                )
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)
        self._residual.copy_(state["residual"])
        self._owner.buffer.copy_(state["owner"])
        self._load_common(state)

    def _load_common(self, state: dict[str, Any]) -> None:
        """Take the part of a state that all ranks have alike."""
        self._applied_steps = state["applied_steps"]
        self.skipped_steps = state["skipped_steps"]
        device = self._residual.device
        masks = [
            None if marks is None else mask_from_marks(self._shards, marks.to(device))
            for marks in (state["mask"], state["next_mask"])
        ]
        self._mask, self._next_mask = masks
        if self._mask is not None:
            self._owner.support = self._mask.locals[self.group.rank]

    # --- other members ------------------------------------------------------------------------

    def common_state(self) -> dict[str, Any]:
        """What all ranks have alike, as copies: a rank that joins starts from it."""
        state = self.state_dict()
        for own in ("rank", "size", "residual", "owner"):
            del state["state"][own]
        return state

    def load_common_state(self, state_dict: dict[str, Any]) -> None:
        """Take what `common_state` gave on another rank of the same model."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)
        self._load_common(state_dict["state"])

    def held(self) -> Held:
        """What this rank alone has: its residual [n] and its owner's buffer [S], fp32, shared."""
        return Held(self._residual, self._owner.buffer)

    @torch.no_grad()
    def held_after(self, staged: StagedStep | None) -> Held:
        """What `held` will be when `staged` is committed, as copies; nothing changes yet."""
        if staged is None:
            return Held(self._residual.clone(), self._owner.buffer.clone())
        residual = self._residual.add(self._gradients.flat, alpha=self._owner.gradient_weight)
        residual.index_copy_(0, staged.mask.positions, staged.leftover)
        return Held(residual, self._owner.staged())

    def held_in(self, state: dict[str, Any]) -> Held:
        """What `held` will be after `regroup` with this state."""
        return Held(state["state"]["residual"], state["state"]["owner"])

    @torch.no_grad()
    def move(self, group: Group, change: Change, held: dict[int, Held]) -> dict[str, Any]:
        """This rank's state in `group`, from what its ranks hold; all of them call it.

        Nothing changes here until `regroup`. `held`: by old rank, what this rank holds. The result
        is that of `reshard`, bit for bit; what was lost counts as zero.
        """
        if change.keeps(group.size):  # nothing moves: it may be that only a newcomer was seen
            own = Held(*(tensor.clone() for tensor in held[group.rank]))
        else:
            old_shards = make_shards(self._regions, change.old_size)
            parts = gather_held(group, change, held, old_shards, self._residual)
            shard = make_shards(self._regions, group.size)[group.rank]
            own = Held(parts.residual, shard.take(parts.owner))
        state = self.common_state()
        state["state"] |= {
            "rank": group.rank,
            "size": group.size,
            "residual": own.residual,
            "owner": own.owner,
        }
        return state

    def regroup(self, group: Group, state: dict[str, Any]) -> None:
        """Go on in another group with the state that `move` made."""
        self.group = group
        self._divide()
        self.load_state_dict(state)

    def _identity(self) -> dict[str, Any]:
        return {
            "second_moment": self.second_moment,
            "sizes_by_group": self._sizes,
            "size": self.group.size,
            "rank": self.group.rank,
        }


def _arrived(mask: Mask | MaskGathering) -> Mask:
    return mask if isinstance(mask, Mask) else mask.wait()


def _check_options(
    betas: tuple[float, float],
    eps: float,
    second_moment: str,
    density: float,
    density_ramp_steps: int,
    refresh: int,
    delay: int,
    exclude_in_flight: bool,
    wire_dtype: torch.dtype,
) -> None:
    checks = (
        ("eps", eps, eps >= 1e-15, ">= 1e-15 (its square is kept in fp32)"),
        (
            "second_moment",
            second_moment,
            second_moment in ("local", "momentum"),
            "'local' or 'momentum'",
        ),
        ("density", density, 0 < density <= 1, "in (0, 1]"),
        ("density_ramp_steps", density_ramp_steps, density_ramp_steps >= 0, ">= 0"),
        ("refresh", refresh, refresh >= 1, ">= 1"),
        ("delay", delay, delay in (0, 1), "0 or 1"),
        (
            "wire_dtype",
            wire_dtype,
            wire_dtype in (torch.float32, torch.bfloat16),
            "torch.float32 or torch.bfloat16",
        ),
    )
    for name, value, good, allowed in checks:
        if not good:
            raise ConfigError(f"{name} is {value!r}; it must be {allowed}")
    if exclude_in_flight and delay == 0:
        raise ConfigError(
            "exclude_in_flight is True with delay 0, where nothing is in flight when a mask is "
            "chosen; use delay=1 or leave it out"
        )
    if second_moment == "local" and betas[0] != 0:
        raise ConfigError(
            f"betas[0] is {betas[0]} with second_moment 'local'; it must be 0 there, because error "
            f"feedback plays the part of momentum; use second_moment='momentum' for AdamS"
        )
