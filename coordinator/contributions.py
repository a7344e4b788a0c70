"""Reading contribution files: one payload per cell that the shard's rows touch, in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from loco import codec
from loco.errors import PayloadError
from loco.layout import CHUNK, cells
from loco.outer import Piece


class ShardReader:
    """Hands out the pieces of one shard cell by cell, as the reducer walks the cells.

    A payload is read when it is asked for: of all the sites' shards one is in memory at a time.
    """

    def __init__(self, path: Path, *, rows: range, weight: float, scale: float) -> None:
        self._cells = cells(rows)
        self._next = next(self._cells, None)
        self._payloads = read_payloads(path, rows)
        self._weight = weight
        self._scale = scale

    def pieces(self, cell: range) -> Iterator[Piece]:
        """The piece within `cell`, if the shard has one."""
        if self._next is None or self._next.start >= cell.stop:
            return
        rows, payload = next(self._payloads)
        self._next = next(self._cells, None)
        yield Piece(
            start=(rows.start - cell.start) * CHUNK,
            num_elements=len(rows) * CHUNK,
            weight=self._weight,
            scale=self._scale,
            payload=payload,
        )
        if self._next is None:
            next(self._payloads, None)  # bytes that follow the last payload are an error


def read_payloads(path: Path, rows: range) -> Iterator[tuple[range, bytes]]:
    """`(rows, payload)` for each cell of a shard; PayloadError where the file does not fit."""
    with path.open("rb") as file:
        for part in cells(rows):
            head = file.read(codec.HEADER_BYTES)
            yield part, head + file.read(header_of(head, part).length - len(head))
        if file.read(1):
            raise PayloadError("trailing_bytes", "bytes follow the last payload of the shard")


def header_of(head: bytes, rows: range) -> codec.Header:
    """The header of the payload of a cell; a size that does not fit `rows` is refused before any
    byte behind it is read."""
    found = codec.peek(head)
    if found.num_elements != len(rows) * CHUNK:
        raise PayloadError(
            "wrong_size",
            f"a payload of {found.num_elements} elements for rows {rows.start} to {rows.stop - 1}, "
            f"which have {len(rows) * CHUNK}",
        )
    return found
