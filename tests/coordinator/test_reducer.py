"""The reducer on files: neither the order of arrival nor the number of ranks changes a bit.

Compared with: the equations of docs/algorithm.md in float64, and other cuts of the same
contributions. Run alone: pytest tests/coordinator/test_reducer.py
"""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.runs import LAYOUT, Array, config_of, create_store, digest_of, shard_body, vector

from coordinator import reducer as reducer_module
from coordinator.recovery import recover
from coordinator.state import Contribution, State
from coordinator.store import Store
from loco import codec
from loco.config import Config
from loco.digest import bytes_digest
from loco.layout import CELL_CHUNKS, CHUNK, Layout, cells

SPARSE = config_of()
DENSE = config_of(codec={"bits": 32}, outer={"aggregation": "mean", "alpha": 0.7})
NESTEROV = config_of(codec={"bits": 32}, outer={"aggregation": "nesterov", "alpha": 0.7})
SPARSE_NESTEROV = config_of(
    outer={"aggregation": "nesterov", "alpha": 0.7, "unsent": "replica", "beta": 0.0}
)
DELTAS = {
    "paris": (vector(LAYOUT, 1, scale=1e-2), 300),
    "oslo": (vector(LAYOUT, 2, scale=1e-2), 100),
    "kyoto": (vector(LAYOUT, 3, scale=1e-2), 17),
}


def write(store: Store, site: str, a: Array, tokens: int, ranks: int) -> Contribution:
    """Put the contribution of a site on disk, as its uploads do."""
    digests, norm_sq = {}, 0.0
    for rank in range(ranks):
        body = shard_body(a, store.config, layout=store.layout, rank=rank, ranks=ranks)
        digests[rank] = bytes_digest(body).hex()
        path = store.contribution(0, site, 1, rank, digests[rank])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    return Contribution(
        incarnation=1,
        num_shards=ranks,
        tokens=tokens,
        inner_steps=1,
        data_cursor=1,
        digests=digests,
        norm_sq=norm_sq,
    )


def reduce(
    directory: Path,
    config: Config,
    order: Iterable[str] = tuple(DELTAS),
    *,
    ranks: int = 1,
    layout: Layout = LAYOUT,
    deltas: dict[str, tuple[Array, int]] = DELTAS,
) -> tuple[bytes, Array, Array]:
    """Update, theta and residual after one round whose contributions arrived in `order`."""
    store = create_store(directory, config, layout=layout)
    try:
        state, reducer = recover(store)
        contributions = {site: write(store, site, *deltas[site], ranks) for site in order}
        closing: State = replace(
            state, phase="closing", contributions=contributions, included=tuple(contributions)
        )
        made = reducer.reduce(closing)
        update = store.update(0).read_bytes()
        assert made.update_bytes == len(update)
        assert made.update_digest == bytes_digest(update).hex()
        assert made.theta_digest == digest_of(reducer.theta)
        return update, np.array(reducer.theta), np.array(reducer._buffers["residual"])
    finally:
        store.close()


def decoded(a: Array, config: Config) -> Array:
    """v: what the coordinator sees of `a`."""
    if config.codec.bits == 32:
        return a
    out = np.zeros_like(a)
    for cell in cells(range(len(a) // CHUNK)):
        here = slice(cell.start * CHUNK, cell.stop * CHUNK)
        found = codec.encode(a[here], k=config.codec.k, bits=config.codec.bits)
        out[here][found.indices] = found.values
    return out


@pytest.mark.parametrize(
    "config",
    [SPARSE, DENSE, NESTEROV, SPARSE_NESTEROV],
    ids=["sparse", "dense", "nesterov", "sparse nesterov"],
)
def test_any_order_of_arrival_gives_the_same_bits(config: Config, tmp_path: Path) -> None:
    made = [
        reduce(tmp_path / str(i), config, order)
        for i, order in enumerate(itertools.permutations(DELTAS))
    ]
    assert len({update for update, _, _ in made}) == 1
    assert len({theta.tobytes() for _, theta, _ in made}) == 1
    assert len({residual.tobytes() for _, _, residual in made}) == 1


@pytest.mark.parametrize(
    "config",
    [SPARSE, DENSE, NESTEROV, SPARSE_NESTEROV],
    ids=["sparse", "dense", "nesterov", "sparse nesterov"],
)
def test_ranks_only_cut_rows(config: Config, tmp_path: Path) -> None:
    """A site of one rank and one of several give the same update."""
    whole = reduce(tmp_path / "1", config)
    for ranks in (2, 3, 7):
        cut = reduce(tmp_path / str(ranks), config, ranks=ranks)
        assert cut[0] == whole[0]
        assert cut[1].tobytes() == whole[1].tobytes()


def test_a_model_of_several_cells_meets_cell_by_cell(tmp_path: Path) -> None:
    """Shards that end inside a cell, and cells that end inside a shard."""
    layout = Layout.of([("a", (CELL_CHUNKS + 300, CHUNK)), ("b", (5,))])
    deltas: dict[str, Any] = {
        "paris": (vector(layout, 1), 2),
        "oslo": (vector(layout, 2), 1),
    }
    config = config_of(outer={"aggregation": "mean"}, codec={"k": 8})
    one = reduce(tmp_path / "1", config, deltas, layout=layout, deltas=deltas)
    three = reduce(tmp_path / "3", config, deltas, ranks=3, layout=layout, deltas=deltas)
    assert one[0] == three[0]
    assert one[1].tobytes() == three[1].tobytes()


def test_threads_that_share_cells_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three cells on two threads against one, for shards of one rank and of three."""
    layout = Layout.of([("a", (2 * CELL_CHUNKS + 100, CHUNK))])
    deltas: dict[str, Any] = {"paris": (vector(layout, 1), 2), "oslo": (vector(layout, 2), 1)}
    made = []
    for threads, ranks in ((1, 1), (2, 1), (2, 3)):
        monkeypatch.setattr(reducer_module, "reducing_threads", lambda *_, n=threads: n)
        directory = tmp_path / f"{threads}-{ranks}"
        made.append(
            reduce(directory, SPARSE_NESTEROV, deltas, ranks=ranks, layout=layout, deltas=deltas)
        )
    for update, theta, residual in made[1:]:
        assert update == made[0][0]
        assert np.array_equal(theta, made[0][1])
        assert np.array_equal(residual, made[0][2])


@pytest.mark.parametrize("aggregation", ["mean", "mean_contributors"])
@pytest.mark.parametrize("bits", [1, 2, 32])
def test_the_mean_is_weighted_by_tokens(aggregation: str, bits: int, tmp_path: Path) -> None:
    """g, u and s + applied = u in float64, for weights of 300, 100 and 17 tokens."""
    config = config_of(codec={"bits": bits}, outer={"aggregation": aggregation, "alpha": 0.7})
    _, theta, residual = reduce(tmp_path, config)
    seen = {site: decoded(a, config).astype(np.float64) for site, (a, _) in DELTAS.items()}
    tokens = {site: count for site, (_, count) in DELTAS.items()}
    total = sum(tokens[site] * v for site, v in seen.items())
    if aggregation == "mean" or bits == 32:
        g = total / sum(tokens.values())
    else:
        senders = sum(tokens[site] * (v != 0) for site, v in seen.items())
        g = np.divide(total, senders, out=np.zeros_like(total), where=senders > 0)
    applied = vector(LAYOUT, 0).astype(np.float64) - theta
    np.testing.assert_allclose(applied + residual, 0.7 * g, rtol=1e-4, atol=1e-6)
    if bits == 32:
        assert not residual.any()


def test_nesterov_against_its_definition(tmp_path: Path) -> None:
    """First step of SGD with Nesterov momentum 0.9: alpha * (g + 0.9 g)."""
    _, theta, _ = reduce(tmp_path, NESTEROV)
    total = sum(tokens for _, tokens in DELTAS.values())
    g = sum(tokens / total * a.astype(np.float64) for a, tokens in DELTAS.values())
    applied = vector(LAYOUT, 0).astype(np.float64) - theta
    np.testing.assert_allclose(applied, 0.7 * 1.9 * g, rtol=1e-4, atol=1e-6)


def test_1_2_3_and_6_have_the_mean_3(tmp_path: Path) -> None:
    """Of which a running pairwise average makes 4.125."""
    config = config_of(codec={"bits": 32}, outer={"aggregation": "mean"})
    ones = np.where(vector(LAYOUT, 0) != 0, np.float32(1), np.float32(0))
    deltas = {f"site-{n}": (np.float32(n) * ones, 10) for n in (1, 2, 3, 6)}
    _, theta, _ = reduce(tmp_path, config, deltas, deltas=deltas)
    np.testing.assert_allclose(vector(LAYOUT, 0) - theta, 3.0 * ones, atol=1e-6)


def test_files_that_no_accepted_shard_names_do_not_count(tmp_path: Path) -> None:
    """Sites are counted, not files: of another life, of other bytes, of a site that is not in."""
    alone = reduce(tmp_path / "alone", SPARSE, ["paris"])
    store = create_store(tmp_path / "beside", SPARSE)
    state, reducer = recover(store)
    have = write(store, "paris", DELTAS["paris"][0], 300, 1)
    other = shard_body(DELTAS["oslo"][0], SPARSE)
    for site, incarnation, shard in (("paris", 2, 0), ("paris", 1, 1), ("oslo", 1, 0)):
        store.contribution(0, site, incarnation, shard, "ab" * 16).write_bytes(other)
    store.contribution(0, "paris", 1, 0, "cd" * 16).write_bytes(other)
    closing = replace(state, phase="closing", contributions={"paris": have}, included=("paris",))
    reducer.reduce(closing)
    update = store.update(0).read_bytes()
    store.close()
    assert update == alone[0]


def test_memory_does_not_grow_with_sites(tmp_path: Path) -> None:
    """One accumulator: 32 dense contributions take what 2 take, not 4 bytes a parameter each."""
    config = config_of(codec={"bits": 32}, outer={"aggregation": "mean"})
    layout = Layout.of([("w", (128, CHUNK))])
    a = vector(layout, 1)
    peaks = []
    for count in (2, 32):
        deltas = {f"site-{i:02}": (a, 10) for i in range(count)}
        tracemalloc.start()
        reduce(tmp_path / str(count), config, deltas, layout=layout, deltas=deltas)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 0.5 * layout.dense_bytes


def test_a_shard_file_that_is_gone_is_an_error_not_a_zero(tmp_path: Path) -> None:
    store = create_store(tmp_path, SPARSE)
    state, reducer = recover(store)
    have = write(store, "paris", DELTAS["paris"][0], 5, 1)
    store.contribution(0, "paris", 1, 0, have.digests[0]).unlink()
    closing = replace(state, phase="closing", contributions={"paris": have}, included=("paris",))
    with pytest.raises(FileNotFoundError):
        reducer.reduce(closing)
    store.close()
    assert not list((tmp_path / "updates").iterdir())
