"""Small runs for tests: a config, a layout of odd shapes, a store, what sites send. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator.store import Store
from loco import codec
from loco.config import Config
from loco.digest import chunk_hashes, theta_digest
from loco.layout import CHUNK, Layout, cells

Array = npt.NDArray[np.float32]

# 0-d to 3-d, prime lengths, one parameter of several chunks: 7 chunks in all.
SHAPES = (
    ("embed.weight", (61, 7)),
    ("block.weight", (3, 4096)),
    ("block.bias", (4099,)),
    ("scale", ()),
)
LAYOUT = Layout.of(SHAPES)


def config_of(**sections: dict[str, Any]) -> Config:
    """The default config with some keys changed: `config_of(codec={"bits": 32})`."""
    return Config.model_validate(sections)


def vector(layout: Layout, seed: int, *, scale: float = 1.0) -> Array:
    """Random numbers where the layout has parameters, zeros in the padding.  # [num_elements]"""
    rng = np.random.default_rng(seed)
    out = np.zeros(layout.num_elements, np.float32)
    for p in layout.parameters:
        out[p.start : p.start + p.numel] = scale * rng.standard_normal(p.numel, dtype=np.float32)
    return out


def digest_of(theta: Array) -> str:
    return theta_digest(chunk_hashes(theta))


def create_store(
    directory: Path, config: Config, *, layout: Layout = LAYOUT, theta: Array | None = None
) -> Store:
    """A new run in `directory`, its theta random unless given."""
    if theta is None:
        theta = vector(layout, seed=0)
    return Store.create(directory, run_id="test-run", config=config, layout=layout, theta=theta)


def shard_body(
    a: Array, config: Config, *, layout: Layout = LAYOUT, rank: int = 0, ranks: int = 1
) -> bytes:
    """What rank `rank` of `ranks` sends of `a` [num_elements]: one payload a cell."""
    parts = []
    for cell in cells(layout.shard(rank, ranks)):
        piece = a[cell.start * CHUNK : cell.stop * CHUNK]
        bits = config.codec.bits
        encoded = (
            codec.encode_dense(piece)
            if bits == 32
            else codec.encode(piece, k=config.codec.k, bits=bits)
        )
        parts.append(encoded.payload)
    return b"".join(parts)
