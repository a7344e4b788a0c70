"""The positions that SCAPE exchanges in a step: chosen by their owners, known to every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from loco.inner import maskwire
from loco.inner.groups import Gathering, Group
from loco.inner.shards import Shard

SAMPLE = 8192
"""Scores looked at to guess a threshold."""


@dataclass(frozen=True)
class Mask:
    """K positions of the flat vector, owner by owner, ascending within an owner's shard."""

    locals: tuple[Tensor, ...]
    """For each owner its positions within its shard, [k_owner] int64."""
    positions: Tensor  # [K] int64, flat

    @cached_property
    def counts(self) -> list[int]:
        """Number of positions of each owner."""
        return [local.numel() for local in self.locals]

    def part(self, rank: int) -> slice:
        """Where the positions of an owner stand in `positions`."""
        start = sum(self.counts[:rank])
        return slice(start, start + self.counts[rank])

    def marks(self, n: int) -> Tensor:
        """The mask as [n] bool."""
        marks = torch.zeros(n, dtype=torch.bool, device=self.positions.device)
        marks[self.positions] = True
        return marks


def make_mask(shards: list[Shard], locals_by_owner: list[Tensor]) -> Mask:
    """A mask from each owner's positions within its shard."""
    flat = [s.to_flat(local) for s, local in zip(shards, locals_by_owner, strict=True)]
    return Mask(tuple(locals_by_owner), torch.cat(flat))


def mask_from_marks(shards: list[Shard], marks: Tensor) -> Mask:
    """A mask from [n] bool."""
    return make_mask(shards, [torch.nonzero(s.take(marks)).view(-1) for s in shards])


def select(scores: Tensor, shard: Shard, density: float) -> Tensor:
    """The positions with the k largest scores of every slice.

    Args:
        scores: [shard.sparse_length] fp32, not negative.

    Returns:
        Ascending local positions [shard.num_kept(density)] int64. Which of equal scores is kept is
        the choice of torch.topk on that device; only the owner makes it, so ranks cannot differ.
    """
    chosen, start = [scores.new_empty(0, dtype=torch.int64)], 0
    for length, k in shard.slices(density):
        chosen.append(_top(scores[start : start + length], k) + start)
        start += length
    return torch.cat(chosen)


def _top(scores: Tensor, k: int) -> Tensor:
    """Ascending positions [k] of the k largest of scores [n]."""
    n = scores.numel()
    if k == n:
        return torch.arange(n, device=scores.device)
    candidates = None if scores.is_cuda or n < 8 * SAMPLE else _candidates(scores, k)
    if candidates is not None:
        scores = scores.index_select(0, candidates)
    marks = torch.zeros_like(scores, dtype=torch.bool)
    marks[torch.topk(scores, k, sorted=False).indices] = True
    top = torch.nonzero_static(marks, size=k).view(-1)
    return top if candidates is None else candidates.index_select(0, top)


def _candidates(scores: Tensor, k: int) -> Tensor | None:
    """Positions of a superset of the top k, a little more than k; None if the guess fell short.

    torch.topk costs 10 ns an element on a CPU, ten times a comparison. So it gets only what
    exceeds a threshold that a sample suggests, four standard deviations on the safe side.
    """
    n = scores.numel()
    sample = scores[:: n // SAMPLE | 1]  # an odd stride does not stay in one column of a matrix
    share = k / n
    kept = math.ceil(sample.numel() * (1.05 * share + 4 * math.sqrt(share / sample.numel())))
    threshold = torch.topk(sample, min(kept, sample.numel()), sorted=True).values[-1]
    # NumPy's nonzero is four times faster than torch's here.
    candidates = torch.from_numpy(np.flatnonzero((scores >= threshold).numpy()))
    return candidates if candidates.numel() >= k else None


class MaskGathering:
    """Every owner's choice on its way to every rank; the dense positions need no message.

    Args:
        chosen: this rank's sparse local positions, from `select` at the same density.
    """

    def __init__(self, group: Group, shards: list[Shard], chosen: Tensor, density: float) -> None:
        self._shards = shards
        self._kept = [s.num_kept(density) for s in shards]
        self._chosen = chosen
        self._sizes = [
            maskwire.wire_bytes(s.sparse_length, k) for s, k in zip(shards, self._kept, strict=True)
        ]
        self._gathering: Gathering | None = None
        if group.size > 1:
            code = maskwire.encode(chosen, shards[group.rank].sparse_length)
            padded = code.new_zeros(max(self._sizes))
            padded[: code.numel()] = code
            self._gathering = group.all_gather(padded)

    def wait(self) -> Mask:
        """The mask, equal on all ranks."""
        if self._gathering is None:
            sparse = [self._chosen]
        else:
            sparse = [
                maskwire.decode(code[:size], shard.sparse_length, k)
                for code, size, shard, k in zip(
                    self._gathering.wait(), self._sizes, self._shards, self._kept, strict=True
                )
            ]
        return make_mask(
            self._shards,
            [
                torch.cat([s, torch.arange(o.sparse_length, o.length, device=s.device)])
                for s, o in zip(sparse, self._shards, strict=True)
            ],
        )
