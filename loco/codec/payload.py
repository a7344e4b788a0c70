"""Encode and decode one payload: Q(TopK(a)) as bytes, and back.

SparseLoCo (arXiv 2508.15706, section 3): v = Q(TopK(a)) per chunk. No torch is imported here: core
data are NumPy arrays, CPU tensors are viewed without a copy, `dense()` imports torch when called.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from loco.codec.body import chunk_lengths, read_body, read_dense, uniform_k, write_body
from loco.codec.header import (
    DENSE_BITS,
    HEADER_BYTES,
    MAX_CHUNK,
    Buffer,
    Header,
    checksum,
    peek,
    write_header,
)
from loco.codec.rice import Ints
from loco.codec.selection import Floats, Selection, magnitudes, quantize, top_k_mask
from loco.errors import NonFiniteError, PayloadError

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_ELEMENTS = 1 << 18  # the work is cut in blocks of whole chunks, about 1 MiB of fp32 each


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """A flat vector that is zero outside `indices`."""

    num_elements: int
    selection: Selection | None
    """None: every element is sent as it is."""
    raw: Floats | None = None
    """The elements, where `selection` is None."""

    @cached_property
    def indices(self) -> Ints:
        """Flat indices of the sent values, ascending.  # [num_values] int64"""
        return np.arange(self.num_elements) if self.selection is None else self.selection.indices()

    @cached_property
    def values(self) -> Floats:
        """The sent values, quantized.  # [num_values] fp32"""
        if self.selection is not None:
            return self.selection.values()
        assert self.raw is not None
        return self.raw

    @property
    def num_values(self) -> int:
        """How many values are sent."""
        return self.num_elements if self.selection is None else len(self.selection.positions)

    def dense(self) -> Tensor:
        """The whole vector, zeros included.  # [num_elements] fp32, on the CPU"""
        import torch

        flat = np.zeros(self.num_elements, np.float32)
        flat[self.indices] = self.values
        return torch.from_numpy(flat)


@dataclass(frozen=True, kw_only=True)
class Encoded(Decoded):
    """A payload, and what whoever decodes it will see."""

    payload: bytes


def encode(
    a: Tensor | Floats, *, k: int | npt.ArrayLike = 64, bits: int = 2, chunk: int = 4096
) -> Encoded:
    """Q(TopK(a)) as bytes: the k largest of each chunk, sign and magnitude level.

    Args:
        a: fp32, any shape (taken flat), any length.
        k: values a chunk sends, an integer or one for each chunk. Zeros are never sent, so a chunk
            sends min(k, its non-zeros). Among equals the lowest index goes first.
        bits: 2 (sign and one of two levels a chunk) or 1 (sign and the chunk's one level).
        chunk: elements a chunk, 1 to 32768; the last one may be short.

    Raises:
        NonFiniteError: names the first index that is NaN or infinite.
        ValueError: k, bits or chunk out of range; a not fp32.
    """
    flat = as_flat(a)
    ks = chunk_ks(k, len(flat), chunk)
    check_bits(bits)
    parts = [
        select(flat[start:stop], ks[first:last], bits=bits, chunk=chunk, offset=start)
        for start, stop, first, last in blocks(len(flat), chunk)
    ]
    selection = join(parts, num_elements=len(flat), bits=bits, chunk=chunk)
    return Encoded(num_elements=len(flat), selection=selection, payload=to_bytes(selection))


def encode_dense(a: Tensor | Floats) -> Encoded:
    """Every element as fp32, in the same checked header: for dense DiLoCo and control runs.

    Raises:
        NonFiniteError: names the first index that is NaN or infinite.
    """
    flat = as_flat(a).copy()
    check_finite(flat, 0)
    body = flat.astype("<f4", copy=False).tobytes()
    header = write_header(
        bits=DENSE_BITS, chunk=0, k=0, num_elements=len(flat), num_values=len(flat), body=body
    )
    return Encoded(num_elements=len(flat), selection=None, raw=flat, payload=header + body)


def decode(payload: Buffer, num_elements: int) -> Decoded:
    """The indices and values of a payload that must describe `num_elements` elements.

    Everything is checked. Memory stays below 64 bytes for each byte of the payload, because a value
    takes at least two bits there; time is linear in the payload.

    Raises:
        PayloadError: with a reason of `REASONS`; nothing else, whatever the bytes.
    """
    header, body = open_payload(payload, num_elements)
    if header.bits == DENSE_BITS:
        return Decoded(num_elements=num_elements, selection=None, raw=read_dense(body))
    return Decoded(num_elements=num_elements, selection=read_body(header, body))


def decode_add(
    payload: Buffer, acc: Floats, *, weight: float = 1.0, weight_acc: Floats | None = None
) -> int:
    """acc[indices] += weight * values, and weight_acc[indices] += weight; returns num_values.

    All in fp32: the weight is rounded first, then each product, then each sum. Nothing is written
    unless the whole payload is valid.

    Raises:
        PayloadError: as `decode`.
    """
    decoded = decode(payload, len(acc))
    rounded = np.float32(weight)
    acc[decoded.indices] += rounded * decoded.values
    if weight_acc is not None:
        weight_acc[decoded.indices] += rounded
    return decoded.num_values


def open_payload(payload: Buffer, num_elements: int) -> tuple[Header, memoryview]:
    """Header and body of exactly one payload, sizes and checksums checked."""
    header = peek(payload)
    if header.num_elements != num_elements:
        raise PayloadError(
            "wrong_size", f"{header.num_elements} elements; {num_elements} expected here"
        )
    whole = memoryview(payload).cast("B")
    if len(whole) < header.length:
        raise PayloadError("truncated", f"{len(whole)} of {header.length} bytes")
    if len(whole) > header.length:
        raise PayloadError("trailing_bytes", f"{len(whole)} bytes; the header says {header.length}")
    body = whole[-(header.length - HEADER_BYTES) :] if header.length > HEADER_BYTES else whole[:0]
    if checksum(body) != header.body_checksum:
        raise PayloadError("bad_checksum", "the body does not match its checksum")
    return header, body


def to_bytes(selection: Selection) -> bytes:
    """Header and body of a selection."""
    body = write_body(selection)
    header = write_header(
        bits=selection.bits,
        chunk=selection.chunk,
        k=uniform_k(selection),
        num_elements=selection.num_elements,
        num_values=len(selection.positions),
        body=body,
    )
    return header + body


def blocks(num_elements: int, chunk: int) -> Iterator[tuple[int, int, int, int]]:
    """Cuts of whole chunks: start and stop in elements, first and last in chunks."""
    per_block = max(1, BLOCK_ELEMENTS // chunk)
    num_chunks = -(-num_elements // chunk)
    for first in range(0, num_chunks, per_block):
        last = min(first + per_block, num_chunks)
        yield first * chunk, min(last * chunk, num_elements), first, last


def select(flat: Floats, ks: Ints, *, bits: int, chunk: int, offset: int) -> Selection:
    """Top-k and quantization of one block of chunks; `offset` is for the error message."""
    check_finite(flat, offset)
    mag = magnitudes(flat)
    whole = len(flat) // chunk
    mask = np.zeros(len(flat), np.bool_)
    full = whole * chunk
    mask[:full] = top_k_mask(mag[:full].reshape(whole, chunk), ks[:whole]).reshape(-1)
    if full < len(flat):
        mask[full:] = top_k_mask(mag[None, full:], ks[whole:])[0]
    sent = np.flatnonzero(mask)
    counts = np.bincount(sent // chunk, minlength=len(ks))
    high, levels = quantize(mag[sent], counts, bits)
    return Selection(
        num_elements=len(flat),
        chunk=chunk,
        bits=bits,
        counts=counts,
        positions=(sent % chunk).astype(np.uint16),
        negative=np.signbit(flat[sent]),
        high=high,
        levels=levels,
    )


def join(parts: list[Selection], *, num_elements: int, bits: int, chunk: int) -> Selection:
    """Selections of consecutive blocks as one."""
    empty = select(np.zeros(0, np.float32), np.zeros(0, np.int64), bits=bits, chunk=chunk, offset=0)
    parts = parts or [empty]
    return Selection(
        num_elements=num_elements,
        chunk=chunk,
        bits=bits,
        counts=np.concatenate([part.counts for part in parts]),
        positions=np.concatenate([part.positions for part in parts]),
        negative=np.concatenate([part.negative for part in parts]),
        high=np.concatenate([part.high for part in parts]),
        levels=np.concatenate([part.levels for part in parts]),
    )


def as_flat(a: Tensor | Floats) -> Floats:
    """`a` as a flat fp32 array, without a copy if it is contiguous and on the CPU."""
    array = a if isinstance(a, np.ndarray) else a.detach().cpu().numpy()
    if array.dtype != np.float32:
        raise ValueError(f"dtype {array.dtype}: the codec takes float32; convert before encoding")
    return array.reshape(-1)


def chunk_ks(k: int | npt.ArrayLike, num_elements: int, chunk: int) -> Ints:
    """One k for each chunk.  # [C] int64"""
    if not 1 <= chunk <= MAX_CHUNK:
        raise ValueError(f"chunk {chunk}: allowed are 1 to {MAX_CHUNK} elements")
    lengths = chunk_lengths(num_elements, chunk)
    ks = np.asarray(k)
    if ks.dtype.kind not in "iu" or ks.shape not in ((), lengths.shape):
        raise ValueError(
            f"k of shape {ks.shape}: one integer, or one for each of {len(lengths)} chunks"
        )
    if ks.size and (ks.min() < 0 or ks.max() > chunk):
        raise ValueError(f"k from {ks.min()} to {ks.max()}: allowed are 0 to chunk = {chunk}")
    return np.broadcast_to(ks.astype(np.int64), lengths.shape)


def check_bits(bits: int) -> None:
    """Refuse anything but 1 and 2."""
    if bits not in (1, 2):
        raise ValueError(f"bits {bits}: allowed are 1 and 2 (encode_dense sends whole numbers)")


def check_finite(flat: Floats, offset: int) -> None:
    """Name the first element that is NaN or infinite."""
    finite = np.isfinite(flat)
    if not finite.all():
        first = int(np.argmin(finite))
        raise NonFiniteError(f"element {offset + first} is {flat[first]}; nothing was encoded")
