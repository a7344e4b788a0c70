"""From the contributions on disk to the update on disk, cell by cell: memory for one cell.

Runs in a thread of the coordinator, never on its event loop. Deterministic: the same contributions
give the same update, so that replay after a crash makes the same bytes again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from coordinator.contributions import ShardReader
from coordinator.state import Contribution
from coordinator.store import Store, write_aside
from loco.config import Config
from loco.digest import chunk_hashes, theta_digest
from loco.layout import CHUNK, cells
from loco.outer import OuterRules, Piece, outer_step

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """What a reduction made; the update file lies on disk."""

    update_bytes: int
    update_digest: str
    theta_digest: str


class Reducer:
    """Owns theta, residual and momentum of the run."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._layout = store.layout
        self._rules = _outer_rules(store.config)
        self._buffers = store.work()
        self._hashes = chunk_hashes(self.theta)

    @property
    def theta(self) -> Array:
        """[num_elements] fp32, memory-mapped."""
        return self._buffers["theta"]

    @property
    def theta_digest(self) -> str:
        return theta_digest(self._hashes)

    def reduce(self, round_: int, included: Mapping[str, Contribution]) -> Reduced:
        """Make and apply the update of a round; its file replaces one of the same round."""
        total = sum(c.tokens for c in included.values())
        readers = [
            ShardReader(
                self._store.contribution(round_, site, have.incarnation, shard, digest),
                rows=self._layout.shard(shard, have.num_shards),
                weight=have.tokens / total,
            )
            for site, have in sorted(included.items())
            for shard, digest in sorted(have.digests.items())
        ]
        path = self._store.update(round_)
        digest = xxhash.xxh3_128()
        with write_aside(path) as file:
            for cell in cells(range(self._layout.num_chunks)):
                pieces = [piece for reader in readers for piece in reader.pieces(cell)]
                payload = self._reduce_cell(cell, pieces)
                digest.update(payload)
                file.write(payload)
        return Reduced(
            update_bytes=path.stat().st_size,
            update_digest=digest.hexdigest(),
            theta_digest=self.theta_digest,
        )

    def _reduce_cell(self, cell: range, pieces: list[Piece]) -> bytes:
        here = slice(cell.start * CHUNK, cell.stop * CHUNK)
        momentum = self._buffers.get("momentum")
        payload = outer_step(
            self._rules,
            pieces,
            theta=self.theta[here],
            residual=self._buffers["residual"][here],
            momentum=None if momentum is None else momentum[here],
        )
        self._hashes[cell.start : cell.stop] = chunk_hashes(self.theta[here])
        return payload

    def save_snapshot(self, round_: int) -> None:
        self._store.save_snapshot(round_, self._buffers, self.theta_digest)


def _outer_rules(config: Config) -> OuterRules:
    return OuterRules(
        aggregation=config.outer.aggregation,
        alpha=config.outer.alpha,
        momentum=config.outer.momentum,
        bits=config.codec.bits,
    )
