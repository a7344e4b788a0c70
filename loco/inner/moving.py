"""State that one rank alone holds, on its way to the ranks of another group.

SCAPE's residual and owner's buffer exist once a site. When members change, those that have a part
of it (their own, or a copy of the rank before them) broadcast it to the new group. Everything else
of a replicated model is equal on all ranks and does not move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from loco.inner.groups import Group
from loco.inner.shards import Shard


@dataclass(frozen=True, kw_only=True)
class Change:
    """How the ranks of a new group hold what those of the old one had."""

    old_size: int
    holders: tuple[int | None, ...]
    """For each old rank the new one that brings its state; None: it is lost, and counts as zero."""

    @property
    def lost_fraction(self) -> float:
        """Share of the old ranks whose state is lost."""
        return self.holders.count(None) / self.old_size

    def keeps(self, size: int) -> bool:
        """Whether every rank of `size` has what it had before."""
        return self.holders == tuple(range(size))


class Held(NamedTuple):
    """What one rank alone has."""

    residual: Tensor  # [n] fp32
    owner: Tensor  # [S] fp32


def gather_held(
    group: Group, change: Change, held: dict[int, Held], shards: Sequence[Shard], like: Tensor
) -> Held:
    """Everything that the old ranks held, on every rank of `group`.

    Args:
        held: by old rank, what this rank holds.
        shards: of the old ranks.
        like: the residual of this rank, [n].

    Returns:
        The mean of the residuals [n], and the owners' buffers side by side, [n].
    """
    mean, owner, part = torch.zeros_like(like), torch.zeros_like(like), torch.empty_like(like)
    first = True
    for old, (holder, shard) in enumerate(zip(change.holders, shards, strict=True)):
        if holder is None:
            continue
        buffer = part.new_empty(shard.length)
        if group.rank == holder:
            part.copy_(held[old].residual)
            buffer.copy_(held[old].owner)
        group.broadcast(part, holder)
        group.broadcast(buffer, holder)
        shard.put(owner, buffer)
        mean = part.clone() if first else mean.add_(part)
        first = False
    return Held(mean.div_(change.old_size), owner)
