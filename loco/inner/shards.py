"""How SCAPE lays out parameters in one flat vector and divides them among the ranks of a site.

Flat order: the sparse tensors of every parameter group, then the dense ones (fewer than two
dimensions: norms, biases). Each such region is cut into one contiguous piece a rank, so that every
rank owns the same share of each, whatever the sizes. A shard is the pieces of one rank, sparse ones
first; its local positions count through them. Where a piece meets a tensor is a slice: the unit in
which the top-k is taken, so that k is exact and known to all ranks without a message.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Region:
    """A contiguous part of the flat vector with one treatment: [start, stop)."""

    start: int
    stop: int
    group: int
    """Index of the parameter group."""
    sparse: bool
    tensor_starts: tuple[int, ...]
    """Flat positions where its tensors begin."""


@dataclass(frozen=True)
class Piece:
    """The part of a region that one rank owns."""

    flat_start: int
    local_start: int
    length: int
    region: Region

    def slice_lengths(self) -> list[int]:
        """Lengths of the intersections with the region's tensors, in order."""
        stop = self.flat_start + self.length
        inside = [s for s in self.region.tensor_starts if self.flat_start < s < stop]
        edges = [self.flat_start, *inside, stop]
        return [b - a for a, b in pairwise(edges) if b > a]


@dataclass(frozen=True)
class Shard:
    """What one rank owns."""

    pieces: tuple[Piece, ...]
    length: int
    sparse_length: int
    """Local positions [0, sparse_length) are sparse; the rest is on the mask at every step."""

    def flat_parts(self, flat: Tensor) -> list[Tensor]:
        """This shard of a flat vector [n], as views, one a piece."""
        return [flat[p.flat_start : p.flat_start + p.length] for p in self.pieces]

    def local_parts(self, local: Tensor) -> list[Tensor]:
        """The parts of a vector [length] that belong to the pieces, as views."""
        return [local[p.local_start : p.local_start + p.length] for p in self.pieces]

    def take(self, flat: Tensor) -> Tensor:
        """This shard of a flat vector [n], as a copy [length]."""
        return torch.cat([flat[:0], *self.flat_parts(flat)])

    def put(self, flat: Tensor, values: Tensor) -> None:
        """Write `values` [length] into this shard of a flat vector [n]."""
        pairs = zip(self.flat_parts(flat), self.local_parts(values), strict=True)
        for part, value in pairs:
            part.copy_(value)

    def split(self, local: Tensor) -> list[tuple[slice, Piece]]:
        """Which part of ascending local positions [k] lies in which piece."""
        stops = torch.tensor([p.local_start + p.length for p in self.pieces], device=local.device)
        edges = [0, *torch.searchsorted(local, stops).tolist()]
        return [
            (slice(a, b), piece) for (a, b), piece in zip(pairwise(edges), self.pieces, strict=True)
        ]

    def to_flat(self, local: Tensor) -> Tensor:
        """Flat positions of ascending local positions, [k] int64 both."""
        flat = local.clone()
        for part, piece in self.split(local):
            flat[part] += piece.flat_start - piece.local_start
        return flat

    def slices(self, density: float) -> list[tuple[int, int]]:
        """(length, k) of the sparse slices in local order, k = density x length, at least 1."""
        lengths = [n for p in self.pieces if p.region.sparse for n in p.slice_lengths()]
        return [(n, max(1, round(density * n))) for n in lengths]

    def num_kept(self, density: float) -> int:
        """Number of sparse positions on the mask at `density`."""
        return sum(k for _, k in self.slices(density))


def make_regions(sizes_by_group: list[list[tuple[int, bool]]]) -> list[Region]:
    """Lay out tensors given as (number of elements, sparse) in each parameter group."""
    regions, start = [], 0
    for sparse in (True, False):
        for group, tensors in enumerate(sizes_by_group):
            starts, stop = [], start
            for size, is_sparse in tensors:
                if is_sparse == sparse and size > 0:
                    starts.append(stop)
                    stop += size
            if stop > start:
                regions.append(Region(start, stop, group, sparse, tuple(starts)))
            start = stop
    return regions


def make_shards(regions: list[Region], size: int) -> list[Shard]:
    """Cut each region into `size` pieces whose lengths differ by at most one element.

    The longer pieces of one region go to other ranks than those of the region before.
    """
    shards, longer = [], 0
    counts: list[list[tuple[int, int]]] = [[] for _ in range(size)]
    for region in regions:
        share, rest = divmod(region.stop - region.start, size)
        start = region.start
        for rank in range(size):
            length = share + ((rank - longer) % size < rest)
            counts[rank].append((start, length))
            start += length
        longer = (longer + rest) % size
    for own in counts:
        pieces, local = [], 0
        for region, (start, length) in zip(regions, own, strict=True):
            if length:
                pieces.append(Piece(start, local, length, region))
                local += length
        sparse = sum(p.length for p in pieces if p.region.sparse)
        shards.append(Shard(tuple(pieces), local, sparse))
    return shards


def is_sparse(parameter: Any) -> bool:
    """Whether SCAPE sparsifies a parameter: matrices and above; norms and biases stay dense."""
    return bool(parameter.ndim >= 2)
