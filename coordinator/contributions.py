"""Reading contribution files: one payload per cell that the shard's rows touch, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

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
            header = file.read(codec.HEADER_BYTES)
            yield part, header + file.read(_rest_bytes(header, part))
        if file.read(1):
            raise PayloadError("trailing_bytes", "bytes follow the last payload of the shard")


def _rest_bytes(header: bytes, rows: range) -> int:
    """Bytes after the header; a size that does not fit `rows` is refused before it is read."""
    found = codec.peek(header)
    if found.num_elements != len(rows) * CHUNK:
        raise PayloadError(
            "wrong_size",
            f"a payload of {found.num_elements} elements for rows {rows.start} to {rows.stop - 1}, "
            f"which have {len(rows) * CHUNK}",
        )
    return found.length - len(header)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What a shard holds."""

    num_values: int
    norm_sq: float
    """Sum of squares of the values."""
    largest: float
    """Largest magnitude of a value; NaN or infinity if one is not finite."""
    largest_at: int
    """Its element in the padded buffer."""


def check_contribution(path: Path, rows: range, *, bits: int) -> Checked:
    """Decode a whole shard strictly; PayloadError where it is malformed.

    A value that is not finite is no fault of the bytes: it is told as the largest one.
    """
    num_values, norm_sq, largest, largest_at = 0, 0.0, 0.0, 0
    for part, payload in read_payloads(path, rows):
        found = codec.peek(payload).bits
        if found != bits:
            raise PayloadError(
                "bad_header", f"{found}-bit payload, this round has {bits} bits a value"
            )
        try:
            sent = codec.decode(payload, len(part) * CHUNK)
        except PayloadError as error:
            if error.reason != "non_finite":
                raise
            return _not_finite(payload, part)
        if not len(sent.values):
            continue
        num_values += len(sent.values)
        norm_sq += float(np.square(sent.values, dtype=np.float64).sum())
        top = int(np.argmax(np.abs(sent.values)))
        if abs(sent.values[top]) > largest:
            largest = float(abs(sent.values[top]))
            largest_at = part.start * CHUNK + int(sent.indices[top])
    return Checked(num_values=num_values, norm_sq=norm_sq, largest=largest, largest_at=largest_at)


def _not_finite(payload: bytes, rows: range) -> Checked:
    """Where the first such value is; only a dense payload can express one."""
    values = np.frombuffer(payload[codec.HEADER_BYTES :], "<f4")
    at = int(np.argmin(np.isfinite(values)))
    return Checked(
        num_values=len(values),
        norm_sq=float("nan"),
        largest=float(abs(values[at])),
        largest_at=rows.start * CHUNK + at,
    )
