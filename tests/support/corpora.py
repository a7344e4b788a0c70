"""Prepared corpora for tests: token files with a manifest, made without any text."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from loco.tokens.prepared import Manifest, Shard, dump


def prepared(
    directory: Path, *, vocab_size: int = 256, token_bytes: int = 1, tokenizer: str = ""
) -> Path:
    """A corpus whose tokens stand for so many bytes each, random tokens below `vocab_size`."""
    directory.mkdir()
    rng = np.random.default_rng(0)
    shards = []
    for split in ("train", "validation"):
        tokens = rng.integers(0, vocab_size, 4000).astype(np.uint16)
        np.save(directory / f"{split}.npy", tokens)
        shards.append(
            Shard(
                split=split,  # type: ignore[arg-type]
                file=f"{split}.npy",
                num_tokens=4000,
                num_bytes=4000 * token_bytes,
                num_documents=1,
                digest="",
            )
        )
    manifest = Manifest(
        tokenizer="mine", tokenizer_digest=tokenizer, vocab_size=vocab_size, settings={},
        sources=[], shards=shards,
    )  # fmt: skip
    (directory / "manifest.json").write_text(dump(manifest))
    return directory
