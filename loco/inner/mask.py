"""The positions that SCAPE exchanges in a step: chosen by their owners, known to every rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from loco.inner import maskwire
from loco.inner.groups import Gathering, Group
from loco.inner.shards import Shard


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
        scores: [shard.sparse_length] fp32.

    Returns:
        Ascending local positions [shard.num_kept(density)] int64. Which of equal scores is kept is
        the choice of torch.topk on that device; only the owner makes it, so ranks cannot differ.
    """
    marks = torch.zeros_like(scores, dtype=torch.bool)
    start = 0
    for length, k in shard.slices(density):
        top = torch.topk(scores[start : start + length], k, sorted=False).indices
        marks[start + top] = True
        start += length
    return torch.nonzero_static(marks, size=shard.num_kept(density)).view(-1)


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
