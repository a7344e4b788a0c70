"""The sections of a body, in order, and how they are read; `reference.write_sections` writes them.

    counts    Rice stream   zigzag differences; only if the header's k is 0
    low       Rice stream   zigzag differences of the lower level codes of sending chunks
    spread    Rice stream   upper minus lower level code of sending chunks      (2 bits only)
    highs     Rice stream   gaps between the values that take the upper level   (2 bits only)
    signs     bit string    one bit a value, 1 = negative
    drop      Rice stream   by how much each sending chunk's Rice parameter for gaps is lower than
                            its length and count suggest: its values lie near its start
    gaps      Rice codes    gaps between positions

A Rice stream is its parameter (u8), the length of its unary part in bytes (u32), its unary part and
its binary part; the gaps have no u8, because each chunk has its own parameter.
"""

from __future__ import annotations

import numpy as np
import xxhash

from loco.codec.backend import operations
from loco.codec.header import Buffer, Header, low_bits
from loco.codec.rice import (
    MAX_RICE,
    Bytes,
    Ints,
    gap_rice,
    unzigzag,
)
from loco.codec.selection import (
    FIRST_LEVEL,
    MAX_LEVEL,
    Bools,
    Codes,
    Floats,
    Selection,
    chunk_lengths,
)
from loco.errors import PayloadError


def read_body(header: Header, body: memoryview) -> tuple[Selection, dict[str, int]]:
    """Inverse of `write_sections`: the selection, and the bytes of each section.

    Raises:
        PayloadError: wrong numbers of codes, positions outside a chunk, levels that are none, a
            section that is cut, set padding bits, bytes after the last section.
    """
    reader = Reader(body)
    lengths = chunk_lengths(header.num_elements, header.chunk)
    counts = _read_counts(reader, header, lengths)
    levels = _read_levels(reader, header, counts)
    high = np.zeros(header.num_values, np.bool_)
    if header.bits == 2:
        high[_read_highs(reader, header.num_values)] = True
    negative = reader.flags("signs", header.num_values)
    rice = _read_rice(reader, counts, lengths)
    gaps = reader.codes("gaps", counts, rice)
    positions = operations().place(gaps, counts, lengths)
    if positions is None:
        raise PayloadError("bad_index", "a position outside its chunk")
    reader.finish()
    selection = Selection(
        num_elements=header.num_elements,
        chunk=header.chunk,
        counts=counts,
        positions=positions,
        negative=negative,
        high=high,
        levels=levels,
    )
    return selection, reader.sizes


def _read_counts(reader: Reader, header: Header, lengths: Ints) -> Ints:
    if header.k:
        return np.minimum(header.k, lengths)
    counts = np.cumsum(unzigzag(reader.stream("counts", header.num_chunks)))
    if ((counts < 0) | (counts > lengths)).any():
        raise PayloadError("bad_count", "a chunk sends fewer than 0 or more than all its elements")
    if counts.sum() != header.num_values:
        raise PayloadError("bad_count", f"counts sum to {counts.sum()}, not {header.num_values}")
    return counts


def _read_levels(reader: Reader, header: Header, counts: Ints) -> Codes:
    sending = np.flatnonzero(counts)
    columns = [np.cumsum(unzigzag(reader.stream("low", len(sending)))) + FIRST_LEVEL]
    if header.bits == 2:
        columns.append(columns[0] + reader.stream("spread", len(sending)))
    found = np.stack(columns, axis=1)
    if ((found < 1) | (found > MAX_LEVEL)).any():
        raise PayloadError("bad_level", f"a level code outside 1 to {MAX_LEVEL}")
    levels = np.zeros((len(counts), header.bits), np.uint16)
    levels[sending] = found
    return levels


def _read_highs(reader: Reader, num_values: int) -> Ints:
    places = np.cumsum(reader.stream("highs", num_values, at_most=True) + 1) - 1
    if len(places) and places[-1] >= num_values:
        raise PayloadError("bad_count", f"an upper level at value {places[-1]} of {num_values}")
    return places


def _read_rice(reader: Reader, counts: Ints, lengths: Ints) -> Ints:
    rice = gap_rice(counts, lengths)
    sending = counts > 0
    rice[sending] -= reader.stream("drop", int(sending.sum()))
    if (rice < 0).any():
        raise PayloadError("bad_rice", "a chunk's Rice parameter is negative")
    return rice


def read_dense(body: Buffer) -> Floats:
    """The body of a dense payload: little-endian fp32, all finite."""
    values = np.frombuffer(body, "<f4")
    if not np.isfinite(values).all():
        raise PayloadError("non_finite", "a value is NaN or infinite")
    return values


class DenseBody:
    """The body of a dense payload that comes in pieces: nobody needs all of it in memory.

    Its values are those of `read_dense`, but for the check for finiteness, which is the caller's.
    """

    def __init__(self, header: Header) -> None:
        """`header` is of a payload with bits = 32."""
        self._expected = header.body_checksum
        self._sum = xxhash.xxh3_64()

    def take(self, piece: Buffer) -> Floats:
        """The values of the next bytes, a multiple of four.  # [len(piece) / 4] fp32"""
        self._sum.update(piece)
        return np.frombuffer(piece, "<f4")

    def finish(self) -> None:
        """PayloadError (`bad_checksum`) unless what was taken has the header's checksum."""
        if low_bits(self._sum.intdigest()) != self._expected:
            raise PayloadError("bad_checksum", "the body does not match its checksum")


class Reader:
    """Takes the sections of a body from its start; refuses what is not there."""

    def __init__(self, body: Buffer) -> None:
        self._left: Bytes = np.frombuffer(body, np.uint8)
        self.sizes: dict[str, int] = {}
        """Bytes of each section so far."""

    def flags(self, section: str, count: int) -> Bools:
        """`count` bits, as booleans."""
        bits = np.unpackbits(self._take_bits(section, count), count=count, bitorder="little")
        return bits.view(np.bool_)

    def stream(self, section: str, count: int, *, at_most: bool = False) -> Ints:
        """A Rice stream with its own parameter; `count` values, or any number up to that."""
        r = int(self._take(section, 1)[0])
        if r > MAX_RICE:
            raise PayloadError("bad_rice", f"parameter {r} of {section}; allowed: 0 to {MAX_RICE}")
        unary, found = self._unary(section, count, at_most=at_most)
        return self._fields(section, unary, np.array([found]), np.array([r]))

    def codes(self, section: str, counts: Ints, rice: Ints) -> Ints:
        """Rice codes: runs of `counts[i]` values with parameter `rice[i]`."""
        unary, _ = self._unary(section, int(counts.sum()))
        return self._fields(section, unary, counts, rice)

    def finish(self) -> None:
        """Refuse what is left."""
        if len(self._left):
            raise PayloadError("trailing_bytes", f"{len(self._left)} bytes after the last section")

    def _take(self, section: str, count: int) -> Bytes:
        if count > len(self._left):
            raise PayloadError(
                "truncated", f"{section}: {count} bytes needed, {len(self._left)} left"
            )
        taken, self._left = self._left[:count], self._left[count:]
        self.sizes[section] = self.sizes.get(section, 0) + count
        return taken

    def _take_bits(self, section: str, count: int) -> Bytes:
        packed = self._take(section, -(-count // 8))
        if count % 8 and int(packed[-1]) >> count % 8:
            raise PayloadError("bad_padding", f"{section}: a bit after the last one is set")
        return packed

    def _unary(self, section: str, count: int, *, at_most: bool = False) -> tuple[Bytes, int]:
        """A unary part and how many codes it holds, counted before memory is taken for them."""
        size = int.from_bytes(self._take(section, 4).tobytes(), "little")
        unary = self._take(section, size)
        if size and not unary[-1]:
            raise PayloadError("bad_padding", f"{section}: a unary part ends in a zero byte")
        found = int(np.bitwise_count(unary).sum())
        if found > count or (found < count and not at_most):
            raise PayloadError("bad_count", f"{section}: {found} codes instead of {count}")
        return unary, found

    def _fields(self, section: str, unary: Bytes, counts: Ints, rice: Ints) -> Ints:
        fields = self._take_bits(section, int((counts * rice).sum()))
        if not counts.any():  # often, in small payloads, and a call costs more than the check
            return np.zeros(0, np.int64)
        return operations().unpack(unary, fields, counts, rice)
