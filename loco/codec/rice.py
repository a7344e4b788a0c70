"""Rice codes, the one entropy code of the format, as two bit strings that NumPy can read.

A non-negative integer v with parameter r is `v >> r` in unary (that many zeros, then a one) and the
low r bits in binary. All unary parts form one bit string, all binary parts another; both fill
bytes from the lowest bit. Where v is the gap between set bits of density p, this is within 0.1 bit
a set bit of the bound h(p) / p (Golomb 1966, Rice 1971), r = 0 being the plain bitmap.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from loco.codec.header import Buffer
from loco.errors import PayloadError

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

MAX_RICE = 24  # a field of r bits then lies in 4 bytes, wherever it starts


def gap_rice(counts: Ints, lengths: Ints) -> Ints:
    """Best parameter for the gaps of `counts` random positions among `lengths`, per chunk.

    2^r halves the golden ratio's share: doubling 2^r pays while (1 - p)^(2^r) > 0.618, which is
    2^r < 0.4812 / p. In integers 64 / 133 = 0.4812, so that every implementation agrees.
    """
    rice = np.zeros_like(counts)
    while True:
        grow = (counts << rice) * 133 < 64 * lengths
        grow &= counts > 0
        if not grow.any():
            return rice
        rice += grow


def best_rice(values: Ints) -> int:
    """The parameter that codes `values` in the fewest bits; the lowest of equals."""
    if len(values) == 0:
        return 0
    costs = [int((values >> r).sum()) + r * len(values) for r in range(MAX_RICE + 1)]
    return costs.index(min(costs))


def write_unary(quotients: Ints) -> bytes:
    """Length of the bit string in bytes (u32), then the bit string."""
    if len(quotients) == 0:
        return bytes(4)
    ends = np.cumsum(quotients + 1) - 1
    bits = np.zeros(ends[-1] + 1, np.uint8)
    bits[ends] = 1
    packed = np.packbits(bits, bitorder="little")
    return len(packed).to_bytes(4, "little") + packed.tobytes()


def write_fields(values: Ints, widths: Ints) -> bytes:
    """The low `widths[i]` bits of `values[i]`, one after the other."""
    starts = np.cumsum(widths) - widths
    bit = np.arange(int(widths.sum())) - np.repeat(starts, widths)
    bits = (np.repeat(values, widths) >> bit) & 1
    return np.packbits(bits.astype(np.uint8), bitorder="little").tobytes()


def write_stream(values: Ints) -> bytes:
    """One stream with its own parameter: r (u8), unary part, binary part."""
    r = best_rice(values)
    unary = write_unary(values >> r)
    return bytes([r]) + unary + write_fields(values, np.full(len(values), r))


def zigzag(deltas: Ints) -> Ints:
    """0, -1, 1, -2, ... as 0, 1, 2, 3, ..."""
    return (deltas << 1) ^ (deltas >> 63)


def unzigzag(codes: Ints) -> Ints:
    """Inverse of `zigzag`."""
    return (codes >> 1) ^ -(codes & 1)


class Reader:
    """Takes the sections of a body from its start; refuses what is not there.

    Memory: 8 bytes for each byte of a unary part while it is read, and 8 for each of its ones.
    """

    def __init__(self, body: Buffer) -> None:
        self._left: Bytes = np.frombuffer(body, np.uint8)

    def bytes(self, count: int) -> Bytes:
        """The next `count` bytes, a view."""
        if count > len(self._left):
            raise PayloadError("truncated", f"{count} bytes needed, {len(self._left)} left")
        taken, self._left = self._left[:count], self._left[count:]
        return taken

    def bits(self, count: int) -> npt.NDArray[np.uint8]:
        """The next `count` bits, one a byte."""
        packed = self.bytes(-(-count // 8))
        bits = np.unpackbits(packed, bitorder="little")
        if bits[count:].any():
            raise PayloadError("bad_padding", "a bit after the last one is set")
        return bits[:count]

    def unary(self, count: int | None) -> Ints:
        """The next `count` quotients; None: as many as there are."""
        size = int.from_bytes(self.bytes(4).tobytes(), "little")
        packed = self.bytes(size)
        if size and not packed[-1]:
            raise PayloadError("bad_padding", "a unary part ends in a zero byte")
        ends = np.flatnonzero(np.unpackbits(packed, bitorder="little"))
        if count is not None and len(ends) != count:
            raise PayloadError("bad_count", f"{len(ends)} unary codes; expected {count}")
        return np.diff(ends, prepend=-1) - 1

    def fields(self, widths: Ints) -> Ints:
        """The next fields of `widths` bits each, at most `MAX_RICE`."""
        total = int(widths.sum())
        packed = self.bytes(-(-total // 8))
        if total % 8 and int(packed[-1]) >> total % 8:
            raise PayloadError("bad_padding", "a bit after the last field is set")
        starts = np.cumsum(widths) - widths
        padded = np.concatenate([packed, np.zeros(4, np.uint8)]).astype(np.int64)
        first = starts >> 3
        word = padded[first]
        for i in range(1, 4):
            word |= padded[first + i] << (8 * i)
        return as_ints((word >> (starts & 7)) & ((1 << widths) - 1))

    def stream(self, count: int | None) -> Ints:
        """The next stream with its own parameter; `count` values, None: as many as there are."""
        r = int(self.bytes(1)[0])
        if r > MAX_RICE:
            raise PayloadError("bad_header", f"Rice parameter {r}; allowed: 0 to {MAX_RICE}")
        high = self.unary(count)
        return (high << r) | self.fields(np.full(len(high), r))

    def finish(self) -> None:
        """Refuse what is left."""
        if len(self._left):
            raise PayloadError("trailing_bytes", f"{len(self._left)} bytes after the last section")


def as_ints(values: npt.NDArray[Any]) -> Ints:
    """`values` as int64, without a copy where they are."""
    return values.astype(np.int64, copy=False)
