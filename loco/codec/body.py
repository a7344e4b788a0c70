"""Selection to body bytes and back: which streams, in which order.

counts    Rice stream   zigzag differences; only if the header's k is 0
low       Rice stream   zigzag differences of the lower level codes of sending chunks
high      Rice stream   upper minus lower level code of sending chunks      (2 bits only)
highs     Rice stream   gaps between the values that take the upper level   (2 bits only)
signs     bit string    one bit a value, 1 = negative
gaps      unary, binary gaps between positions; the parameter follows each chunk's count
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from loco.codec.header import Header
from loco.codec.rice import (
    Ints,
    Reader,
    as_ints,
    gap_rice,
    unzigzag,
    write_fields,
    write_stream,
    write_unary,
    zigzag,
)
from loco.codec.selection import LEVEL_BITS, MAX_LEVEL, Selection
from loco.errors import PayloadError

_FIRST_LEVEL = 127 << LEVEL_BITS  # the code of 1.0, from which the first difference counts


def chunk_lengths(num_elements: int, chunk: int) -> Ints:
    """Elements of each chunk: the last one may be short.  # [C]"""
    starts = np.arange(0, num_elements, chunk)
    return np.minimum(chunk, num_elements - starts)


def uniform_k(selection: Selection) -> int:
    """The k for which every chunk sends min(k, its length); 0 if there is none."""
    if len(selection.counts) == 0:
        return 0
    k = int(selection.counts.max())
    lengths = chunk_lengths(selection.num_elements, selection.chunk)
    return k if np.array_equal(selection.counts, np.minimum(k, lengths)) else 0


def write_body(selection: Selection) -> bytes:
    """All sections of the body, in order."""
    counts = selection.counts
    levels = as_ints(selection.levels[counts > 0])
    parts = []
    if not uniform_k(selection):
        parts.append(write_stream(zigzag(np.diff(counts, prepend=0))))
    parts.append(write_stream(zigzag(np.diff(levels[:, 0], prepend=_FIRST_LEVEL))))
    if selection.bits == 2:
        parts.append(write_stream(levels[:, 1] - levels[:, 0]))
        parts.append(write_stream(np.diff(np.flatnonzero(selection.high), prepend=-1) - 1))
    parts.append(np.packbits(selection.negative, bitorder="little").tobytes())
    gaps = _gaps(selection)
    lengths = chunk_lengths(selection.num_elements, selection.chunk)
    rice = np.repeat(gap_rice(counts, lengths), counts)
    parts += [write_unary(gaps >> rice), write_fields(gaps, rice)]
    return b"".join(parts)


def read_body(header: Header, body: memoryview) -> Selection:
    """Inverse of `write_body`; everything is checked.

    Raises:
        PayloadError: anything that `write_body` cannot have written and that would change the
            meaning: wrong numbers of codes, positions outside a chunk, levels that are no level.
    """
    reader = Reader(body)
    counts = _read_counts(reader, header)
    levels = _read_levels(reader, header, counts)
    high = np.zeros(header.num_values, np.bool_)
    if header.bits == 2:
        high[_read_highs(reader, header.num_values)] = True
    negative = reader.bits(header.num_values).view(np.bool_)
    positions = _read_positions(reader, header, counts)
    reader.finish()
    return Selection(
        num_elements=header.num_elements,
        chunk=header.chunk,
        bits=header.bits,
        counts=counts,
        positions=positions,
        negative=negative,
        high=high,
        levels=levels,
    )


def _gaps(selection: Selection) -> Ints:
    """Elements skipped before each value, from the last value or the chunk's start.  # [N]"""
    positions = as_ints(selection.positions)
    gaps = np.diff(positions, prepend=-1) - 1
    first = _first_values(selection.counts)
    gaps[first] = positions[first]
    return gaps


def _first_values(counts: Ints) -> Ints:
    """Where each sending chunk starts among the values."""
    sending = counts[counts > 0]
    return np.cumsum(sending) - sending


def _read_counts(reader: Reader, header: Header) -> Ints:
    lengths = chunk_lengths(header.num_elements, header.chunk)
    if header.k:
        return np.minimum(header.k, lengths)
    counts = np.cumsum(unzigzag(reader.stream(header.num_chunks)))
    if ((counts < 0) | (counts > lengths)).any():
        raise PayloadError("bad_count", "a chunk sends fewer than 0 or more than all its elements")
    if counts.sum() != header.num_values:
        raise PayloadError("bad_count", f"counts sum to {counts.sum()}, not {header.num_values}")
    return counts


def _read_levels(reader: Reader, header: Header, counts: Ints) -> npt.NDArray[np.uint16]:
    sending = np.flatnonzero(counts)
    low = np.cumsum(unzigzag(reader.stream(len(sending)))) + _FIRST_LEVEL
    columns = [low]
    if header.bits == 2:
        columns.append(low + reader.stream(len(sending)))
    found = np.stack(columns, axis=1)
    if ((found < 1) | (found > MAX_LEVEL)).any():
        raise PayloadError("bad_level", f"a level code outside 1 to {MAX_LEVEL}")
    levels = np.zeros((len(counts), header.bits), np.uint16)
    levels[sending] = found
    return levels


def _read_highs(reader: Reader, num_values: int) -> Ints:
    places = np.cumsum(reader.stream(None) + 1) - 1
    if len(places) and places[-1] >= num_values:
        raise PayloadError("bad_count", f"an upper level at value {places[-1]} of {num_values}")
    return places


def _read_positions(reader: Reader, header: Header, counts: Ints) -> npt.NDArray[np.uint16]:
    lengths = chunk_lengths(header.num_elements, header.chunk)
    rice = np.repeat(gap_rice(counts, lengths), counts)
    gaps = (reader.unary(header.num_values) << rice) | reader.fields(rice)
    ends = np.cumsum(gaps + 1)
    first = _first_values(counts)
    before = np.repeat(ends[first] - gaps[first] - 1, counts[counts > 0])
    positions = ends - before - 1
    if (positions >= np.repeat(lengths, counts)).any():
        raise PayloadError("bad_index", "a position outside its chunk")
    narrow: npt.NDArray[np.uint16] = positions.astype(np.uint16)
    return narrow


def read_dense(body: memoryview) -> npt.NDArray[np.float32]:
    """The body of a dense payload: little-endian fp32, all finite."""
    values = np.frombuffer(body, "<f4")
    if not np.isfinite(values).all():
        raise PayloadError("non_finite", "a value is NaN or infinite")
    return values
