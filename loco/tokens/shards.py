"""Tokens of one split: any number of memory-mapped arrays, read as one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from loco.errors import DataError

BYTES = "bytes"
Array = NDArray[np.unsignedinteger]


class TokenSequence(Protocol):
    """What batches and held-out windows are cut from; a NumPy array is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: NDArray[np.int64], /) -> Array: ...


class Tokens:
    """Shards one after the other; `tokens[index]` reads from any of them."""

    def __init__(
        self,
        shards: Sequence[Array],
        *,
        vocab_size: int,
        num_bytes: int,
        corpus: str = "",
        tokenizer: str = BYTES,
    ) -> None:
        self.shards = tuple(shards)
        """Each [its num_tokens] uint8, uint16 or uint32, usually memory-mapped."""
        self.vocab_size = vocab_size
        """Every token is below it."""
        self.num_bytes = num_bytes
        """Bytes of UTF-8 that the tokens stand for."""
        self.corpus = corpus
        """Its name, for errors."""
        self.tokenizer = tokenizer
        """What the numbers mean: `bytes`, or the digest of a tokenizer.json (XXH3-128, hex)."""
        self._ends = np.cumsum([len(shard) for shard in self.shards], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def bytes_per_token(self) -> float:
        """Mean length of a token; turns nats a token into bits per byte."""
        return self.num_bytes / len(self)

    def __getitem__(self, index: NDArray[np.int64]) -> Array:
        """The tokens at these positions (any shape, each 0 to len - 1)."""
        if len(self.shards) == 1:
            return self.shards[0][index]
        owner = np.searchsorted(self._ends, index, side="right")
        out = np.empty(index.shape, np.uint32)
        for number in np.unique(owner):
            here = owner == number
            start = self._ends[number] - len(self.shards[number])
            out[here] = self.shards[number][index[here] - start]
        return out

    def tobytes(self) -> bytes:
        """All tokens as the bytes of their arrays."""
        return b"".join(shard.tobytes() for shard in self.shards)


def join(parts: Sequence[Tokens]) -> Tokens:
    """The tokens of several splits, one after the other; DataError if tokenizers differ."""
    return Tokens(
        [shard for part in parts for shard in part.shards],
        vocab_size=max(part.vocab_size for part in parts),
        num_bytes=sum(part.num_bytes for part in parts),
        corpus=", ".join(part.corpus for part in parts),
        tokenizer=one_tokenizer((part.corpus, part.tokenizer) for part in parts),
    )


def one_tokenizer(named: Iterable[tuple[str, str]]) -> str:
    """The tokenizer of all these (name, tokenizer); DataError names the first two that differ."""
    (first, tokenizer), *others = named
    for name, other in others:
        if other != tokenizer:
            raise DataError(
                f"the tokenizer of {first} is {tokenizer[:16]}, that of {name} is {other[:16]}: a "
                "token would be other text in each; prepare all corpora of a run with one "
                "tokenizer.json (loco data prepare --tokenizer)"
            )
    return tokenizer
