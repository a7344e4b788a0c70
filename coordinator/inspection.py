"""Checking a shard while its bytes come, so that after the last one hardly anything is left.

The file is read behind what was read of it before, in steps that do not depend on how the bytes
come, so that the sum of squares does not either. In memory is one payload, of a dense one a piece.
"""

from __future__ import annotations

import math
import os
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from coordinator.contributions import header_of
from loco import codec
from loco.errors import PayloadError
from loco.layout import CHUNK, cells

PIECE_BYTES = 1024 * 1024


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


class Inspection:
    """How far a shard is checked, and what was found; one thread at a time."""

    def __init__(self, path: Path, rows: range, *, bits: int) -> None:
        """Of the shard that grows in `path`: one payload of `bits` bits a value for each cell."""
        self.read_bytes = 0
        """Bytes that were looked at."""
        self._needed = 0  # bytes with which the reading goes on
        self._come = 0  # bytes that were there at the last look
        self._path = path
        self._whole = False
        self._digest = xxhash.xxh3_128()
        self._num_values, self._norm_sq = 0, 0.0
        self._largest, self._largest_at = 0.0, 0
        self._fault: PayloadError | None = None
        self._reading = self._read(rows, bits)

    @property
    def due(self) -> int:
        """Bytes with which the next look is worth it."""
        return max(self._needed, self.read_bytes + PIECE_BYTES)

    def advance(self, num_bytes: int) -> None:
        """Look at as much as can be looked at of the first `num_bytes`, which are in the file.

        What is wrong with a payload is told by `result`, when the digest has said whether these are
        the bytes that the site meant. OSError.
        """
        self._come = num_bytes
        self._file = os.open(self._path, os.O_RDONLY)
        try:
            next(self._reading, None)
        finally:
            os.close(self._file)

    def finish(self, num_bytes: int) -> str:
        """Look at the rest of the whole shard; the digest of its bytes, hex (XXH3-128)."""
        self._whole = True
        self.advance(num_bytes)
        return self._digest.hexdigest()

    def result(self) -> Checked:
        """After `finish`; PayloadError where the shard is malformed.

        A value that is not finite is no fault of the bytes: it is told as the largest one.
        """
        if self._fault is not None:
            raise self._fault
        return Checked(
            num_values=self._num_values,
            norm_sq=self._norm_sq,
            largest=self._largest,
            largest_at=self._largest_at,
        )

    # --- generators that pause where bytes are missing ------------------------------------------

    def _read(self, rows: range, bits: int) -> Generator[None, None, None]:
        try:
            for part in cells(rows):
                yield from self._read_payload(part, bits)
            if (yield from self._next(1)):
                raise PayloadError("trailing_bytes", "bytes follow the last payload of the shard")
        except PayloadError as error:
            self._fault = error
        while (yield from self._next(PIECE_BYTES)):  # the digest is over all bytes
            pass

    def _read_payload(self, rows: range, bits: int) -> Generator[None, None, None]:
        head = yield from self._next(codec.HEADER_BYTES)
        header = header_of(head, rows)
        if header.bits != bits:
            raise PayloadError(
                "bad_header", f"{header.bits}-bit payload, this round has {bits} bits a value"
            )
        if bits == codec.DENSE_BITS:
            yield from self._read_dense(header, rows)
            return
        rest = yield from self._next(header.length - len(head))
        sent = codec.decode(head + rest, len(rows) * CHUNK)
        at = self._count(sent.values)
        if at is not None:
            self._largest_at = rows.start * CHUNK + int(sent.indices[at])

    def _read_dense(self, header: codec.Header, rows: range) -> Generator[None, None, None]:
        body, first = codec.DenseBody(header), rows.start * CHUNK
        left = header.length - codec.HEADER_BYTES
        while left:
            piece = yield from self._next(min(PIECE_BYTES, left))
            if not piece:
                raise PayloadError("truncated", f"{left} bytes of a payload are missing")
            left -= len(piece)
            values = body.take(piece[: len(piece) // 4 * 4])
            at = self._count(values)
            if at is not None:
                self._largest_at = first + at
            first += len(values)
        body.finish()

    def _next(self, num_bytes: int) -> Generator[None, None, bytes]:
        """The next bytes of the shard; fewer only at its end."""
        self._needed = self.read_bytes + num_bytes
        while self._come < self._needed and not self._whole:
            yield
        data = os.pread(self._file, num_bytes, self.read_bytes)
        self.read_bytes += len(data)
        self._digest.update(data)
        return data

    def _count(self, values: npt.NDArray[np.float32]) -> int | None:
        """Which of these values is larger than all before; None if none is."""
        self._num_values += len(values)
        if not len(values) or not math.isfinite(self._largest):
            return None
        self._norm_sq += float(np.square(values, dtype=np.float64).sum())
        largest = max(float(values.max()), -float(values.min()))
        if largest <= self._largest:
            return None
        self._largest = largest
        if math.isfinite(largest):
            return int(np.argmax(np.abs(values)))
        return int(np.argmin(np.isfinite(values)))
