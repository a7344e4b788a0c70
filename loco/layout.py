"""The canonical order of trainable parameters, cut in chunks of 4096 elements.

Every parameter starts on a chunk boundary of one padded flat fp32 buffer, `[num_chunks, 4096]`;
the padding is zero and a zero is never sent, so a short last chunk costs nothing. Coordinator,
sites, ranks and files all speak of rows of this buffer. Its fingerprint is compared at join.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from loco.errors import ConfigError

CHUNK = 4096  # elements; 16 KiB of fp32
CELL_CHUNKS = 1024  # rows of one payload at most: 4 Mi elements, 16 MiB of fp32


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One trainable parameter and where it lies."""

    name: str
    shape: tuple[int, ...]
    first_chunk: int

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def num_chunks(self) -> int:
        return -(-self.numel // CHUNK)

    @property
    def start(self) -> int:
        """First element in the padded buffer."""
        return self.first_chunk * CHUNK


@dataclass(frozen=True)
class Layout:
    """Ordered parameters; made by `Layout.of`."""

    parameters: tuple[Parameter, ...]

    @classmethod
    def of(cls, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> Layout:
        """Lay out `(name, shape)` pairs in the order given (that of `named_parameters`)."""
        parameters = []
        first_chunk = 0
        for name, shape in shapes:
            parameter = Parameter(name=name, shape=tuple(shape), first_chunk=first_chunk)
            parameters.append(parameter)
            first_chunk += parameter.num_chunks
        return cls(tuple(parameters))

    @cached_property
    def num_chunks(self) -> int:
        return sum(p.num_chunks for p in self.parameters)

    @property
    def num_elements(self) -> int:
        """Elements of the padded buffer."""
        return self.num_chunks * CHUNK

    @cached_property
    def num_parameters(self) -> int:
        """Trainable scalars, padding not counted."""
        return sum(p.numel for p in self.parameters)

    @property
    def dense_bytes(self) -> int:
        """The same parameters in fp32: what one dense contribution would carry."""
        return 4 * self.num_parameters

    def to_json(self) -> str:
        return json.dumps([[p.name, list(p.shape)] for p in self.parameters], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Layout:
        return cls.of((name, tuple(shape)) for name, shape in json.loads(text))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over names, shapes and chunk size, hex."""
        return hashlib.sha256(f"chunk={CHUNK};{self.to_json()}".encode()).hexdigest()

    def shard(self, index: int, count: int) -> range:
        """Rows that rank `index` of `count` keeps: contiguous, every row in exactly one shard."""
        return range(index * self.num_chunks // count, (index + 1) * self.num_chunks // count)

    def parameter_at(self, element: int) -> Parameter:
        """The parameter that holds this element of the padded buffer."""
        for parameter in reversed(self.parameters):
            if parameter.start <= element and parameter.numel:
                return parameter
        raise IndexError(f"element {element} lies outside 0..{self.num_elements - 1}")

    def check_same(self, other: Layout, *, mine: str, theirs: str) -> None:
        """Raise ConfigError naming the first tensor that differs and both shapes."""
        for left, right in zip(self.parameters, other.parameters, strict=False):
            if (left.name, left.shape) != (right.name, right.shape):
                raise ConfigError(
                    f"layout mismatch: {mine} has {left.name} {list(left.shape)}, "
                    f"{theirs} has {right.name} {list(right.shape)}"
                )
        if len(self.parameters) != len(other.parameters):
            longer, whose = (
                (self, mine) if len(self.parameters) > len(other.parameters) else (other, theirs)
            )
            extra = longer.parameters[min(len(self.parameters), len(other.parameters))]
            raise ConfigError(
                f"layout mismatch: only {whose} has {extra.name} {list(extra.shape)} "
                f"({mine} has {len(self.parameters)} parameters, {theirs} {len(other.parameters)})"
            )


def cells(rows: range) -> Iterator[range]:
    """Cut a range of rows at the global grid of `CELL_CHUNKS`: one payload each.

    Contributions of sites with any number of ranks then meet cell by cell, so that the coordinator
    reduces with memory for one cell.
    """
    start = rows.start
    while start < rows.stop:
        stop = min(rows.stop, (start // CELL_CHUNKS + 1) * CELL_CHUNKS)
        yield range(start, stop)
        start = stop
