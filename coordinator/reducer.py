"""From the contributions on disk to the update on disk, cell by cell.

Runs in threads of the coordinator, never on its event loop: a large model's cells are shared by as
many as there are cores, each with memory for one cell. Deterministic: the same contributions give
the same update, on any number of threads, so that replay after a crash makes the same bytes again.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from coordinator.contributions import ShardReader
from coordinator.failpoints import reach
from coordinator.files import write_aside
from coordinator.settings import in_force
from coordinator.snapshots import Snapshot
from coordinator.state import Contribution, State
from coordinator.store import Store
from loco.config import Config
from loco.cpus import usable_cpus
from loco.digest import chunk_hashes, theta_digest
from loco.layout import CHUNK, cells
from loco.outer import OuterRules, outer_step, reducing_threads, rules_at

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """What a reduction made; the update file lies on disk."""

    update_bytes: int
    update_digest: str
    theta_digest: str


class Reducer:
    """Owns theta, residual and momentum of the run."""

    def __init__(self, store: Store, snapshot: Snapshot) -> None:
        self._store = store
        self._layout = store.layout
        self._buffers = store.work(snapshot)
        self.snapshot_round = snapshot.round
        """Round of the newest snapshot that these buffers were read from or written to."""
        self._hashes = chunk_hashes(self.theta)
        self._cells = list(cells(range(self._layout.num_chunks)))
        self._threads = reducing_threads(len(self._cells), usable_cpus())

    @property
    def theta(self) -> Array:
        """[num_elements] fp32, memory-mapped."""
        return self._buffers["theta"]

    @property
    def theta_digest(self) -> str:
        return theta_digest(self._hashes)

    def reduce(self, state: State) -> Reduced:
        """Make and apply the update of the round that `state` is closing.

        Not to be called again after it raised: the buffers are then between two rounds, and
        `coordinator.recovery` makes a new Reducer.
        """
        reach("reduce.before_update")
        included = {name: state.contributions[name] for name in state.included}
        rules = _outer_rules(self._store.config, state)
        readers = self._readers(state.round, included)
        path = self._store.update(state.round)
        digest = xxhash.xxh3_128()
        with write_aside(path) as file, ThreadPoolExecutor(self._threads) as pool:
            for payload in self._payloads(pool, rules, readers):
                digest.update(payload)
                file.write(payload)
                reach("reduce.cell_written")
        reach("reduce.update_renamed")
        return Reduced(
            update_bytes=path.stat().st_size,
            update_digest=digest.hexdigest(),
            theta_digest=self.theta_digest,
        )

    def _readers(self, round_: int, included: Mapping[str, Contribution]) -> list[ShardReader]:
        """One a shard, in the fixed order of sites and shards."""
        total = sum(have.tokens for have in included.values())
        scales = norm_scales(
            {name: math.sqrt(have.norm_sq) for name, have in included.items()},
            self._store.config.outer.max_norm_ratio,
        )
        return [
            ShardReader(
                self._store.contribution(round_, site, have.incarnation, shard, digest),
                rows=self._layout.shard(shard, have.num_shards),
                weight=have.tokens / total,
                scale=scales[site],
            )
            for site, have in sorted(included.items())
            for shard, digest in sorted(have.digests.items())
        ]

    def _payloads(
        self, pool: ThreadPoolExecutor, rules: OuterRules, readers: list[ShardReader]
    ) -> Iterator[bytes]:
        """The update's payload of each cell, in order; as many are in work as there are threads."""
        in_work: deque[Future[bytes]] = deque()
        for cell in self._cells:
            in_work.append(pool.submit(self._reduce_cell, rules, readers, cell))
            if len(in_work) == self._threads:
                yield in_work.popleft().result()
        while in_work:
            yield in_work.popleft().result()

    def _reduce_cell(self, rules: OuterRules, readers: list[ShardReader], cell: range) -> bytes:
        here = slice(cell.start * CHUNK, cell.stop * CHUNK)
        momentum = self._buffers.get("momentum")
        payload = outer_step(
            rules,
            (piece for reader in readers for piece in reader.pieces(cell)),
            theta=self.theta[here],
            residual=self._buffers["residual"][here],
            momentum=None if momentum is None else momentum[here],
        )
        self._hashes[cell.start : cell.stop] = chunk_hashes(self.theta[here])
        return payload

    def save_snapshot(self, state: State, journal_seq: int) -> None:
        """Write theta and the other buffers as they are, with the state that goes with them."""
        self._store.save_snapshot(state, journal_seq, self._buffers)
        self.snapshot_round = state.round


def norm_scales(norms: Mapping[str, float], max_ratio: float | None) -> dict[str, float]:
    """Factors that bring each norm down to `max_ratio` times the median; never above 1.

    No limit where the median is 0: it would leave nothing of a contribution that counts as sent.
    """
    limit = 0.0 if max_ratio is None else max_ratio * statistics.median(norms.values())
    if limit == 0.0:
        return dict.fromkeys(norms, 1.0)
    return {name: min(1.0, limit / norm) if norm else 1.0 for name, norm in norms.items()}


def _outer_rules(config: Config, state: State) -> OuterRules:
    rules = rules_at(config.outer, config.codec, state.round)
    return OuterRules(
        aggregation=rules.aggregation,
        alpha=in_force("outer.alpha", config, state.settings, state.round),
        momentum=config.outer.momentum,
        bits=rules.bits,
    )
