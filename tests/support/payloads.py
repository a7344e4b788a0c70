"""Payloads that are wrong on purpose, with right checksums: the decoder must look deeper."""

from __future__ import annotations

import struct

from loco.codec.header import checksum

FIELDS = {  # offset and struct format, as in docs/protocol.md
    "magic": (0, "<2s"),
    "version": (2, "<B"),
    "bits": (3, "<B"),
    "chunk": (4, "<H"),
    "k": (6, "<H"),
    "num_elements": (8, "<Q"),
    "num_values": (16, "<Q"),
    "length": (24, "<Q"),
}
HEADER = 40


def reseal(payload: bytes | bytearray) -> bytes:
    """The same bytes with both checksums made right."""
    sealed = bytearray(payload)
    sealed[32:36] = checksum(bytes(sealed[HEADER:])).to_bytes(4, "little")
    sealed[36:40] = checksum(bytes(sealed[:36])).to_bytes(4, "little")
    return bytes(sealed)


def with_body(payload: bytes, body: bytes) -> bytes:
    """The header of `payload` around another body."""
    return with_fields(payload[:HEADER] + body, length=HEADER + len(body))


def with_fields(payload: bytes, **fields: int | bytes) -> bytes:
    """`payload` with other header fields."""
    changed = bytearray(payload)
    for name, value in fields.items():
        offset, form = FIELDS[name]
        struct.pack_into(form, changed, offset, value)
    return reseal(changed)


def sections(payload: bytes) -> dict[str, bytes]:
    """The sections of a sound sparse payload by name, in order."""
    from loco.codec.body import read_body
    from loco.codec.header import peek

    body = memoryview(payload)[HEADER:]
    found, at = {}, 0
    for name, size in read_body(peek(payload), body)[1].items():
        found[name] = bytes(body[at : at + size])
        at += size
    return found


def with_sections(payload: bytes, **changed: bytes) -> bytes:
    """`payload` with other bytes in the sections that are named."""
    return with_body(payload, b"".join({**sections(payload), **changed}.values()))
