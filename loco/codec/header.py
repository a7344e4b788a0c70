"""The fixed header of a payload: what it is, how long it is, and two checksums.

A contribution file is several payloads one after the other; `payload_length` cuts it. The byte
layout is described for strangers in docs/protocol.md, "Payload bytes".
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from loco.errors import PayloadError

MAGIC = b"LC"
VERSION = 1
DENSE_BITS = 32
MAX_CHUNK = 32768  # positions inside a chunk and counts both fit 16 bits

# magic, version, bits, chunk, k, num_elements, num_values, length, body checksum, header checksum
_FIELDS = struct.Struct("<2sBBHHQQQII")
HEADER_BYTES = _FIELDS.size
_CHECKED_BYTES = HEADER_BYTES - 4

REASONS = (
    "bad_checksum",
    "bad_count",
    "bad_header",
    "bad_index",
    "bad_level",
    "bad_magic",
    "bad_padding",
    "bad_rice",
    "non_finite",
    "trailing_bytes",
    "truncated",
    "unknown_version",
    "wrong_size",
)
"""Every reason that a `PayloadError` of this package carries; closed, it becomes a metric label."""

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, kw_only=True)
class Header:
    """What the first `HEADER_BYTES` bytes of a payload say."""

    version: int
    bits: int
    """1 or 2 bits a sent value, or 32: dense fp32."""
    chunk: int
    """Elements a chunk; 0 in a dense payload."""
    k: int
    """Values that every chunk sends (a shorter chunk all it has); 0: the body has the counts."""
    num_elements: int
    num_values: int
    length: int
    """Bytes of the whole payload, header included."""
    body_checksum: int

    @property
    def num_chunks(self) -> int:
        """Chunks of the payload, the short last one included."""
        return -(-self.num_elements // self.chunk) if self.chunk else 0


def checksum(data: Buffer) -> int:
    """Low 32 bits of XXH3-64 with seed 0."""
    return low_bits(xxhash.xxh3_64_intdigest(data))


def low_bits(hash_: int) -> int:
    """Of an XXH3-64, what a header has room for."""
    return hash_ & 0xFFFFFFFF


def write_header(
    *, bits: int, chunk: int, k: int, num_elements: int, num_values: int, body: Buffer
) -> bytes:
    """Header for `body`, both checksums filled in."""
    length = HEADER_BYTES + len(body)
    fields = (MAGIC, VERSION, bits, chunk, k, num_elements, num_values, length, checksum(body))
    start = _FIELDS.pack(*fields, 0)[:_CHECKED_BYTES]
    return start + checksum(start).to_bytes(4, "little")


def peek(payload: Buffer) -> Header:
    """Read and check the header alone; the body need not be there.

    Raises:
        PayloadError: too short, not a payload, another version, or fields that contradict.
    """
    head = bytes(memoryview(payload)[:HEADER_BYTES])
    if len(head) < HEADER_BYTES:
        _refuse("truncated", f"{len(head)} bytes; a header has {HEADER_BYTES}")
    magic, version, *fields, body_checksum, head_checksum = _FIELDS.unpack(head)
    if magic != MAGIC:
        _refuse("bad_magic", f"starts with {magic!r}; a payload starts with {MAGIC!r}")
    if version != VERSION:
        _refuse("unknown_version", f"version {version}; this decoder reads {VERSION}")
    if head_checksum != checksum(head[:_CHECKED_BYTES]):
        _refuse("bad_checksum", "the header does not match its checksum")
    bits, chunk, k, num_elements, num_values, length = fields
    header = Header(
        version=version,
        bits=bits,
        chunk=chunk,
        k=k,
        num_elements=num_elements,
        num_values=num_values,
        length=length,
        body_checksum=body_checksum,
    )
    (_check_dense if bits == DENSE_BITS else _check_sparse)(header)
    return header


def payload_length(buffer: Buffer) -> int:
    """Bytes of the payload that starts `buffer`, from its checked header.

    The answer lies between `HEADER_BYTES` and `max_length(num_elements)`. The buffer may hold more
    (the next payload) or less (the rest has not arrived).

    Raises:
        PayloadError: as `peek`.
    """
    return peek(buffer).length


def max_length(num_elements: int) -> int:
    """Upper bound of the length of any payload of `num_elements` elements, in bytes.

    The worst sparse case is chunk = 1: one count, two levels and one value for each element.
    """
    return HEADER_BYTES + 64 + 9 * num_elements


def expected_values(num_elements: int, chunk: int, k: int) -> int:
    """Values sent when every chunk sends k, or all of its elements if it has fewer."""
    full, rest = divmod(num_elements, chunk)
    return full * min(k, chunk) + min(k, rest)


def _check_dense(header: Header) -> None:
    same = header.num_values == header.num_elements and header.chunk == 0 and header.k == 0
    if not same or header.length != HEADER_BYTES + 4 * header.num_elements:
        _refuse("bad_header", f"a dense header that contradicts itself: {header}")


def _check_sparse(header: Header) -> None:
    if header.bits not in (1, 2):
        _refuse("bad_header", f"bits {header.bits}; allowed: 1, 2, {DENSE_BITS}")
    if not 1 <= header.chunk <= MAX_CHUNK or header.k > header.chunk:
        _refuse("bad_header", f"chunk {header.chunk}, k {header.k}; allowed: k <= chunk <= 32768")
    if not HEADER_BYTES <= header.length <= max_length(header.num_elements):
        _refuse("bad_header", f"length {header.length} for {header.num_elements} elements")
    # A value takes at least one unary bit and one sign bit, a counted chunk one unary bit.
    body_bits = 8 * (header.length - HEADER_BYTES)
    if header.k:
        expected = expected_values(header.num_elements, header.chunk, header.k)
        if header.num_values != expected:
            _refuse("bad_count", f"{header.num_values} values; k = {header.k} makes {expected}")
    elif header.num_chunks > body_bits:
        _refuse("bad_count", f"{header.num_chunks} chunks in {body_bits} bits")
    if header.num_values > header.num_elements or 2 * header.num_values > body_bits:
        _refuse("bad_count", f"{header.num_values} values in {body_bits} bits")


def _refuse(reason: str, message: str) -> None:
    assert reason in REASONS
    raise PayloadError(reason, message)
