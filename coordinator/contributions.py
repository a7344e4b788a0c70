"""Reading contribution files: one payload per cell that the shard's rows touch, in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from loco import codec
from loco.errors import PayloadError
from loco.layout import CELL_CHUNKS, CHUNK, cells
from loco.outer import Piece


class ShardReader:
    """Hands out the pieces of one shard by cell, in any order and to any thread.

    A payload is read when it is asked for: of all the sites' shards, a thread that reduces has one
    in memory at a time.

    Raises:
        PayloadError: the file does not fit `rows`.
    """

    def __init__(self, path: Path, *, rows: range, weight: float, scale: float) -> None:
        self._path = path
        self._places = {part.start // CELL_CHUNKS: (part, at) for part, at in _places(path, rows)}
        self._weight = weight
        self._scale = scale

    def pieces(self, cell: range) -> Iterator[Piece]:
        """The piece within `cell`, if the shard has one."""
        if cell.start // CELL_CHUNKS not in self._places:
            return
        rows, at = self._places[cell.start // CELL_CHUNKS]
        yield Piece(
            start=(rows.start - cell.start) * CHUNK,
            num_elements=len(rows) * CHUNK,
            weight=self._weight,
            scale=self._scale,
            payload=_read(self._path, at),
        )


def read_payloads(path: Path, rows: range) -> Iterator[tuple[range, bytes]]:
    """`(rows, payload)` for each cell of a shard; PayloadError where the file does not fit."""
    return ((part, _read(path, at)) for part, at in _places(path, rows))


def _read(path: Path, at: range) -> bytes:
    with path.open("rb") as file:
        file.seek(at.start)
        return file.read(len(at))


def _places(path: Path, rows: range) -> Iterator[tuple[range, range]]:
    """`(rows, bytes of the file)` for each cell of a shard, by the headers of its payloads."""
    with path.open("rb") as file:
        start = 0
        for part in cells(rows):
            length = header_of(file.read(codec.HEADER_BYTES), part).length
            yield part, range(start, start + length)
            start = file.seek(start + length)
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
