"""Corpora for tests: documents, a tokenizer of them, flags of `prepare`; token files of no text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from loco.tokens.prepare import Options
from loco.tokens.prepared import Manifest, Shard, dump

DOCUMENTS = [f"Document {i}: {'ab¢ ' * (i % 7)}€ {i * i}." for i in range(400)]
HELD_OUT = 0.2


def write_jsonl(path: Path, documents: list[str] = DOCUMENTS) -> Path:
    path.write_text("".join(json.dumps({"text": d, "id": 1}) + "\n" for d in documents))
    return path


def options(inputs: list[Path], out: Path, **changes: Any) -> Options:
    flags: dict[str, Any] = {
        "tokenizer": "bytes", "end_of_text": None, "field": "text", "held_out": HELD_OUT,
        "jobs": 1, "item_bytes": 3000,
    }  # fmt: skip
    return Options(inputs=[str(path) for path in inputs], out=out, **{**flags, **changes})


def make_tokenizer(directory: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(DOCUMENTS, trainer)
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return tokenizer


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
