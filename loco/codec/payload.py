"""Encode and decode one payload: Q(TopK(a)) as bytes, and back.

No torch is imported here: core data are NumPy arrays, CPU tensors are viewed without a copy, and
`dense()` imports torch when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from loco.codec.backend import operations
from loco.codec.body import read_body, read_dense
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
from loco.codec.selection import Floats, Selection, chunk_lengths, concatenate
from loco.errors import NonFiniteError, PayloadError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
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
        return self.num_elements if self.selection is None else self.selection.num_values

    def dense(self) -> Tensor:
        """The whole vector, zeros included.  # [num_elements] fp32, on the CPU"""
        import torch

        flat = np.zeros(self.num_elements, np.float32)
        flat[self.indices] = self.values
        return torch.from_numpy(flat)


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoded(Decoded):
    """A payload, and what whoever decodes it will see."""

    payload: bytes


def encode(
    a: Tensor | Floats,
    *,
    k: int | npt.ArrayLike = 64,
    bits: int = 2,
    chunk: int = 4096,
    num_threads: int = 1,
) -> Encoded:
    """Q(TopK(a)) as bytes: the k largest of each chunk, sign and magnitude level.

    Args:
        a: fp32, any shape (taken flat), any length.
        k: values a chunk sends, an integer or one for each chunk. Zeros are never sent, so a chunk
            sends min(k, its non-zeros). Among equals the lowest index goes first.
        bits: 2 (sign and one of two levels a chunk) or 1 (sign and the chunk's one level).
        chunk: elements a chunk, 1 to 32768; the last one may be short.
        num_threads: threads that share the work; the bytes do not depend on it.

    Raises:
        NonFiniteError: names the first index that is NaN or infinite.
        ValueError: k, bits or chunk out of range; a not fp32.
    """
    flat = as_flat(a)
    ks = chunk_ks(k, len(flat), chunk)
    check_bits(bits)
    check_threads(num_threads)
    cuts = cut_blocks(len(flat), chunk, num_threads)
    check_finite(cuts, num_threads, lambda cut: operations().first_non_finite(flat[cut.elements]))

    def select(cut: Cut) -> Selection:
        return operations().select(flat[cut.elements], ks[cut.chunks], bits=bits, chunk=chunk)

    selection = concatenate(in_threads(select, cuts, num_threads))
    return Encoded(num_elements=len(flat), selection=selection, payload=to_bytes(selection))


def encode_dense(a: Tensor | Floats) -> Encoded:
    """Every element as fp32, in the same checked header: for dense DiLoCo and control runs.

    Raises:
        NonFiniteError: names the first index that is NaN or infinite.
        ValueError: a not fp32.
    """
    flat = as_flat(a).copy()
    first = operations().first_non_finite(flat)
    if first >= 0:
        refuse_non_finite(first)
    body = flat.astype("<f4", copy=False).tobytes()
    header = write_header(
        bits=DENSE_BITS, chunk=0, k=0, num_elements=len(flat), num_values=len(flat), body=body
    )
    return Encoded(num_elements=len(flat), selection=None, raw=flat, payload=header + body)


def decode(payload: Buffer, num_elements: int) -> Decoded:
    """The indices and values of a payload that must describe `num_elements` elements.

    Everything is checked, numbers before memory is taken for them. A value takes at least two bits
    of a payload, so memory stays below 192 bytes for each byte of it (48 with Numba), and time is
    linear in its length.

    Raises:
        PayloadError: with a reason of `REASONS`; nothing else, whatever the bytes.
    """
    header, body = open_payload(payload, num_elements)
    if header.bits == DENSE_BITS:
        return Decoded(num_elements=num_elements, selection=None, raw=read_dense(body))
    return Decoded(num_elements=num_elements, selection=read_body(header, body)[0])


def decode_add(
    payload: Buffer, acc: Floats, *, weight: float = 1.0, weight_acc: Floats | None = None
) -> int:
    """acc[indices] += weight * values, and weight_acc[indices] += weight; returns num_values.

    All in fp32: the weight is rounded first, then each product, then each sum. Nothing is written
    unless the whole payload is valid.

    Raises:
        PayloadError: as `decode`.
        ValueError: `acc` or `weight_acc` cannot be written in place, or their lengths differ.
    """
    acc = writable(acc, "acc")
    weight_acc = None if weight_acc is None else writable(weight_acc, "weight_acc")
    if weight_acc is not None and len(weight_acc) != len(acc):
        raise ValueError(f"lengths {len(acc)} of acc and {len(weight_acc)} of weight_acc differ")
    decoded = decode(payload, len(acc))
    rounded = np.float32(weight)
    if decoded.selection is not None:
        operations().add(acc, weight_acc, rounded, decoded.selection)
        return decoded.num_values
    acc += rounded * decoded.values
    if weight_acc is not None:
        weight_acc += rounded
    return decoded.num_values


def open_payload(payload: Buffer, num_elements: int) -> tuple[Header, memoryview]:
    """Header and body of exactly one payload, sizes and checksums checked."""
    header = peek(payload)
    if header.num_elements != num_elements:
        raise PayloadError("wrong_size", f"{header.num_elements} elements, not {num_elements}")
    whole = memoryview(payload).cast("B")
    if len(whole) < header.length:
        raise PayloadError("truncated", f"{len(whole)} of {header.length} bytes")
    if len(whole) > header.length:
        raise PayloadError("trailing_bytes", f"{len(whole)} bytes; the header says {header.length}")
    body = whole[HEADER_BYTES:]
    if checksum(body) != header.body_checksum:
        raise PayloadError("bad_checksum", "the body does not match its checksum")
    return header, body


def to_bytes(selection: Selection) -> bytes:
    """Header and body of a selection."""
    k, sections = operations().write_sections(selection)
    body = b"".join(sections.values())
    header = write_header(
        bits=selection.bits,
        chunk=selection.chunk,
        k=k,
        num_elements=selection.num_elements,
        num_values=selection.num_values,
        body=body,
    )
    return header + body


@dataclass(frozen=True)
class Cut:
    """A range of whole chunks that is worked on at a time."""

    elements: slice
    chunks: slice


def cut_blocks(num_elements: int, chunk: int, num_threads: int) -> list[Cut]:
    """The cuts of a flat buffer, in order; at least one, and one for each thread if possible."""
    num_chunks = -(-num_elements // chunk)
    per_thread = -(-num_chunks // num_threads)
    per_block = max(1, min(operations().BLOCK_ELEMENTS // chunk, per_thread))
    return [
        Cut(
            slice(first * chunk, min((first + per_block) * chunk, num_elements)),
            slice(first, min(first + per_block, num_chunks)),
        )
        for first in range(0, max(num_chunks, 1), per_block)
    ]


def in_threads(work: Callable[[Cut], T], cuts: Sequence[Cut], num_threads: int) -> list[T]:
    """`work` on every cut, by `num_threads` threads; the results in the order of `cuts`."""
    if num_threads == 1 or len(cuts) == 1:
        return [work(cut) for cut in cuts]
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(work, cuts))


def check_threads(num_threads: int) -> None:
    """Refuse fewer than one."""
    if num_threads < 1:
        raise ValueError(f"num_threads {num_threads}: at least 1 is needed")


def check_finite(cuts: Sequence[Cut], num_threads: int, first_bad: Callable[[Cut], int]) -> None:
    """Name the first element that is NaN or infinite; `first_bad` finds it inside a cut, or -1."""
    for cut, found in zip(cuts, in_threads(first_bad, cuts, num_threads), strict=True):
        if found >= 0:
            refuse_non_finite(cut.elements.start + found)


def refuse_non_finite(index: int) -> NoReturn:
    raise NonFiniteError(f"element {index} is NaN or infinite; nothing was encoded")


def as_flat(a: Tensor | Floats) -> Floats:
    """`a` as a flat fp32 array, without a copy if it is contiguous and on the CPU."""
    array = a if isinstance(a, np.ndarray) else a.detach().cpu().numpy()
    if array.dtype != np.float32:
        raise ValueError(f"dtype {array.dtype}: the codec takes float32; convert before encoding")
    return np.require(array, requirements=["C", "A"]).reshape(-1)


def writable(a: Tensor | Floats, name: str) -> Floats:
    """A flat view of `a` itself: what is written there is written to it."""
    array = a if isinstance(a, np.ndarray) else a.detach().numpy()
    flags = array.flags
    if array.dtype != np.float32 or not (flags.c_contiguous and flags.aligned and flags.writeable):
        raise ValueError(f"{name}: must be contiguous, writable float32; it is updated in place")
    return array.reshape(-1)


def chunk_ks(k: int | npt.ArrayLike, num_elements: int, chunk: int) -> Ints:
    """One k for each chunk.  # [C] int64"""
    if not 1 <= chunk <= MAX_CHUNK:
        raise ValueError(f"chunk {chunk}: allowed are 1 to {MAX_CHUNK} elements")
    lengths = chunk_lengths(num_elements, chunk)
    ks = np.asarray(k)
    if ks.dtype.kind not in "iu" or ks.shape not in ((), lengths.shape):
        raise ValueError(
            f"k of type {ks.dtype}, shape {ks.shape}: one integer, or one for each chunk "
            f"({len(lengths)})"
        )
    if ks.size and (ks.min() < 0 or ks.max() > chunk):
        raise ValueError(f"k from {ks.min()} to {ks.max()}: allowed are 0 to chunk = {chunk}")
    return np.ascontiguousarray(np.broadcast_to(ks.astype(np.int64), lengths.shape))


def check_bits(bits: int) -> None:
    """Refuse anything but 1 and 2."""
    if bits not in (1, 2):
        raise ValueError(f"bits {bits}: allowed are 1 and 2 (encode_dense sends whole numbers)")
