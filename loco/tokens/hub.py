"""Data sets of the `datasets` library as inputs: `hf:PATH_OR_ID@SPLIT`, streamed while tokenised.

Nothing is downloaded as a whole and nothing is unpacked to disk. Each shard of the data set is an
item: one process reads it from its beginning to its end, because only who has read it knows where
it can be cut, and work that was interrupted goes on with the shards that are missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from loco.errors import ConfigError, DataError, install_extra

PREFIX = "hf:"
DEFAULT_SPLIT = "train"


@dataclass(frozen=True, kw_only=True)
class StreamPart:
    """Shard `number` of `count` of a data set."""

    name: str
    split: str
    number: int
    count: int
    size_bytes: int = 1
    """Not known; shards count alike in the progress."""

    @property
    def source(self) -> str:
        """What the tokens depend on; the library does not tell a revision."""
        return f"{PREFIX}{self.name}@{self.split}, {self.count} shards"

    @property
    def place(self) -> str:
        """For errors."""
        return f"{PREFIX}{self.name}@{self.split}, shard {self.number} of {self.count}"

    def documents(self, field: str) -> Iterator[str]:
        """The texts in column `field`; DataError if a row has none."""
        rows = open_stream(self.name, self.split).shard(self.count, self.number)
        for row in rows:
            text = row.get(field)
            if not isinstance(text, str):
                raise DataError(
                    f"a row of {PREFIX}{self.name}@{self.split} has no text in column {field!r} "
                    f"(it has {', '.join(row)}): choose another --field"
                )
            yield text


def stream_parts(text: str) -> list[StreamPart]:
    """The shards of `hf:PATH_OR_ID@SPLIT`; the split may be left out."""
    name, _, split = text.removeprefix(PREFIX).partition("@")
    split = split or DEFAULT_SPLIT
    count: int = open_stream(name, split).num_shards
    return [StreamPart(name=name, split=split, number=i, count=count) for i in range(count)]


def open_stream(name: str, split: str) -> Any:
    """A streamed data set; ConfigError or DataError if it cannot be had."""
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"{PREFIX}{name} needs the datasets library: {install_extra('hf')}"
        ) from None
    try:
        return datasets.load_dataset(name, split=split, streaming=True)
    except Exception as error:  # of any library below, that of the network among them
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise DataError(f"cannot open {PREFIX}{name}@{split}: {first}") from error
