"""Tokens of a corpus: of one that was prepared as they are; of other text its bytes, from a cache.

There a token is a byte of UTF-8; documents are joined by an empty line. The cache file is `.npy`,
which states its own dtype and length. It is written aside and renamed, so that many processes may
build the same corpus at once and none reads half a file. Text of any size: neither building nor
reading holds it in memory.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import BinaryIO

import numpy as np

from loco.data.corpus import Piece, find_pieces
from loco.data.mixture import PREFIX, Weighted, parse_mixture
from loco.errors import DataError
from loco.tokens import (
    BYTES,
    Tokens,
    is_prepared,
    join,
    load_prepared,
    one_tokenizer,
    read_manifest,
)
from loco.tokens.prepared import Split

SEPARATOR = b"\n\n"
FORMAT = 1  # raise it when the same text becomes other tokens


def load_tokens(corpus: str, split: Split, *, cache: Path | None = None) -> Tokens:
    """Memory-mapped tokens of a corpus (see `loco.data.corpus`); of a mixture all of its parts'.

    `cache` is the directory for token files; left out, it is $LOCO_CACHE_DIR, or `loco` under the
    user's cache directory. DataError if the corpus is missing or empty, the cache unwritable, or
    parts of a mixture have different tokenizers.
    """
    if corpus.startswith(PREFIX):
        parts = [load_tokens(name, split, cache=cache) for _, name in parse_mixture(corpus)]
        return join(parts)
    if is_prepared(corpus):
        return load_prepared(Path(corpus).expanduser(), split)
    pieces = find_pieces(corpus, split)
    directory = cache or default_cache_dir()
    path = directory / f"{split}-{_fingerprint(pieces)}.npy"
    try:
        if not path.exists():
            _build(path, pieces)
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise DataError(
            f"cannot keep tokens of corpus {corpus!r} under {directory}: {error}; "
            "set LOCO_CACHE_DIR to a directory that can be written"
        ) from error
    return Tokens(
        [tokens],
        vocab_size=256,
        num_bytes=len(tokens),
        corpus=f"corpus {corpus!r}",
        tokenizer=BYTES,
    )


def find_corpus(corpus: str, split: Split) -> str:
    """The corpus's tokenizer; DataError if the corpus cannot be had here. Makes no tokens."""
    named = []
    for _, name in parse_mixture(corpus):
        if is_prepared(name):
            tokens = load_prepared(Path(name).expanduser(), split)
            named.append((tokens.corpus, tokens.tokenizer))
        else:
            find_pieces(name, split)
            named.append((f"corpus {name!r}", BYTES))
    return one_tokenizer(named)


def prepared_tokenizer(corpus: str) -> str | None:
    """The tokenizer of a corpus all of whose parts are prepared and here; None of others.

    DataError if the parts have different ones, or a manifest cannot be read.
    """
    names = [name for _, name in parse_mixture(corpus)]
    if not all(is_prepared(name) for name in names):
        return None
    digests = [read_manifest(Path(name).expanduser()).tokenizer_digest for name in names]
    return one_tokenizer(
        (f"corpus {name!r}", digest or BYTES) for name, digest in zip(names, digests, strict=True)
    )


def load_parts(corpus: str, split: Split, *, cache: Path | None = None) -> list[Weighted]:
    """The corpora that a site mixes, with their weights; of a corpus that is no mixture itself.

    DataError as `load_tokens`.
    """
    parts = [
        Weighted(tokens=load_tokens(name, split, cache=cache), weight=weight)
        for weight, name in parse_mixture(corpus)
    ]
    one_tokenizer((part.tokens.corpus, part.tokens.tokenizer) for part in parts)
    return parts


def default_cache_dir() -> Path:
    if chosen := os.environ.get("LOCO_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "loco"


def _fingerprint(pieces: list[Piece]) -> str:
    """Changes with any file's place, size or time, so that edited text is never served stale."""
    digest = hashlib.sha256(f"format={FORMAT}".encode())
    for piece in pieces:
        modified = piece.path.stat().st_mtime_ns
        digest.update(f"{piece.path.resolve()}:{piece.start}:{piece.stop}:{modified};".encode())
    return digest.hexdigest()[:24]


def _build(path: Path, pieces: list[Piece]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            _write(file, pieces)
            file.flush()
            os.fsync(file.fileno())
        Path(aside).replace(path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


def _write(file: BinaryIO, pieces: list[Piece]) -> None:
    num_tokens = sum(map(len, pieces)) + len(SEPARATOR) * (len(pieces) - 1)
    header = {"descr": "|u1", "fortran_order": False, "shape": (num_tokens,)}
    np.lib.format.write_array_header_1_0(file, header)
    body = file.tell()
    for index, piece in enumerate(pieces):
        file.write(SEPARATOR if index else b"")
        for block in piece.blocks():
            file.write(block)
    if file.tell() - body != num_tokens:
        raise DataError(f"text changed while it was read, near {pieces[0].path}: start again")
