"""What `loco data prepare` wrote: sharded token files, and the manifest that lists them.

manifest.json      what it was made from and how, and every shard with its sizes and digest
train-00000.npy    tokens [num_tokens] uint8, uint16 or uint32: NumPy states dtype and length;
train-00000-1.npy  more of the same item of text
validation-00000.npy
tokenizer.json     of the tokenizers library; not there where tokens are bytes

The manifest is written last: a directory without one is not finished.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from loco.digest import file_digest
from loco.errors import DataError
from loco.tokens.shards import BYTES, Array, Tokens

MANIFEST = "manifest.json"
Split = Literal["train", "validation"]


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Shard(_Document):
    """One token file."""

    split: Split
    file: str
    num_tokens: int
    num_bytes: int
    """Bytes of the text, UTF-8, separators not counted."""
    num_documents: int
    digest: str
    """XXH3-128 of the file, hex."""


class Manifest(_Document):
    """manifest.json."""

    format: Literal[1] = 1
    tokenizer: str
    """`bytes`, or what `--tokenizer` named."""
    tokenizer_digest: str
    """XXH3-128 of tokenizer.json, hex; empty where tokens are bytes."""
    vocab_size: int
    settings: dict[str, str]
    """What else the tokens depend on."""
    sources: list[str]
    """The inputs, each with its size and time."""
    shards: list[Shard]


def is_prepared(corpus: str) -> bool:
    """Whether this corpus name is a directory that `loco data prepare` finished."""
    return (Path(corpus).expanduser() / MANIFEST).is_file()


def read_manifest(directory: Path) -> Manifest:
    """DataError if it is missing or not one of ours."""
    path = directory / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"{directory} holds no {MANIFEST} that can be read ({error.strerror}): "
            "run loco data prepare to its end"
        ) from error
    except (ValidationError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not a manifest of loco data prepare: {error}") from error


def shard_file(split: Split, item: int, number: int) -> str:
    """The name of token file `number` of an item."""
    return f"{split}-{item:05}" + (f"-{number}" if number else "") + ".npy"


def item_number(file: str) -> int:
    """The item whose tokens a file of that name holds."""
    return int(file.removesuffix(".npy").split("-")[1])


def torn(directory: Path, shards: list[Shard]) -> bool:
    """Whether one of them is missing or not as long as the manifest says."""
    try:
        for shard in shards:
            _open(directory / shard.file, shard)
    except DataError:
        return True
    return False


def load_prepared(directory: Path, split: Split) -> Tokens:
    """The split's tokens, memory-mapped; DataError if a shard is missing or of another length."""
    manifest = read_manifest(directory)
    listed = [shard for shard in manifest.shards if shard.split == split and shard.num_tokens]
    if not listed:
        raise DataError(
            f"the prepared corpus {directory} has no {split} tokens: prepare it again with "
            "another --held-out"
        )
    return Tokens(
        [_open(directory / shard.file, shard) for shard in listed],
        vocab_size=manifest.vocab_size,
        num_bytes=sum(shard.num_bytes for shard in listed),
        corpus=f"corpus {str(directory)!r}",
        tokenizer=manifest.tokenizer_digest or BYTES,
    )


def check_prepared(directory: Path) -> list[str]:
    """What is wrong with the files of a prepared corpus, in words; DataError without a manifest."""
    manifest = read_manifest(directory)
    faults = []
    for shard in manifest.shards:
        path = directory / shard.file
        try:
            tokens = _open(path, shard)
            if file_digest(path).hex() != shard.digest:
                faults.append(
                    f"{path} has another digest than the manifest says: delete it and run loco "
                    "data prepare again"
                )
            elif len(tokens) and int(tokens.max()) >= manifest.vocab_size:
                faults.append(f"{path} holds token {tokens.max()} of {manifest.vocab_size}")
        except DataError as error:
            faults.append(str(error))
    return faults


def _open(path: Path, shard: Shard) -> Array:
    try:
        tokens: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read the token file {path}: {error}; run loco data prepare again: it makes "
            "only what is missing"
        ) from error
    if tokens.shape != (shard.num_tokens,):
        raise DataError(
            f"the token file {path} has {tokens.size} tokens, its manifest says "
            f"{shard.num_tokens}: run loco data prepare again: it makes only what is missing"
        )
    return tokens


def dump(document: BaseModel) -> str:
    """A manifest's text: stable, so that equal inputs give equal files."""
    return json.dumps(document.model_dump(mode="json"), indent=1, sort_keys=True) + "\n"
