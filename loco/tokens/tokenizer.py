"""From text to tokens: bytes, or a tokenizer of the `tokenizers` library from local files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

import numpy as np

from loco.errors import ConfigError, DataError, install_extra
from loco.tokens.shards import BYTES, Array


class Encoder(Protocol):
    """Turns documents into tokens."""

    vocab_size: int
    """Every token is below it."""

    def encode(self, documents: list[str]) -> list[Array]:
        """Tokens of each document, what separates it from the next included."""
        ...


class ByteEncoder:
    """A token is a byte of UTF-8; an empty line ends a document."""

    vocab_size = 256

    def encode(self, documents: list[str]) -> list[Array]:
        return [np.frombuffer(f"{text}\n\n".encode(), np.uint8) for text in documents]


class FileEncoder:
    """A `tokenizer.json`; its end-of-text token ends a document."""

    def __init__(self, path: Path, end_of_text: str) -> None:
        """DataError if the file is none, or has no such token."""
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ConfigError(
                f"--tokenizer {path} needs the tokenizers library: {install_extra('hf')}, or use "
                f"--tokenizer {BYTES}"
            ) from None
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises Exception itself
            raise DataError(f"{path} is not a tokenizer.json: {error}") from error
        end = self._tokenizer.token_to_id(end_of_text)
        if end is None:
            raise DataError(
                f"the tokenizer {path} has no token {end_of_text!r}: name the one that ends a "
                "document with --end-of-text"
            )
        # What the file states for a model's inputs would cut documents and fill short ones up.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._end = np.array([end], np.uint32)
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def encode(self, documents: list[str]) -> list[Array]:
        encoded = self._tokenizer.encode_batch_fast(documents, add_special_tokens=False)
        return [np.concatenate([np.array(one.ids, np.uint32), self._end]) for one in encoded]


def tokenizer_file(name: str) -> Path:
    """The tokenizer.json of a model directory, or the file itself; DataError if there is none."""
    path = Path(name).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(
            f"--tokenizer {name!r} is neither a tokenizer.json, nor a directory that holds one, "
            f"nor {BYTES!r}"
        )
    return file


def end_of_text(file: Path) -> str:
    """The end-of-text token stated beside a tokenizer.json; DataError if there is none."""
    config = file.with_name("tokenizer_config.json")
    try:
        stated = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        stated = None
    token = stated.get("content") if isinstance(stated, dict) else stated
    if not isinstance(token, str):
        raise DataError(
            f"beside {file} no tokenizer_config.json states an eos_token: name the token that ends "
            "a document with --end-of-text"
        )
    return token


def make_encoder(tokenizer: str, end: str) -> Encoder:
    """The encoder of a prepared corpus: `bytes`, or the path of a tokenizer.json."""
    return ByteEncoder() if tokenizer == BYTES else FileEncoder(Path(tokenizer), end)
