"""A payload as annotated hex: what each byte means, for golden files and for people.

name of the field       hex                     meaning
"""

from __future__ import annotations

import struct

from support.payloads import FIELDS, HEADER, sections
from support.stranger import Body, signed

CHECKSUMS = {"body checksum": 32, "header checksum": 36}


def explain(payload: bytes) -> str:
    """One line a field and section; `parse` reads it back."""
    lines = [_field(payload, name) for name in FIELDS]
    lines += [
        _line(name, payload[at : at + 4], "XXH3-64, low 32 bits") for name, at in CHECKSUMS.items()
    ]
    if payload[3] == 32:
        values = struct.unpack(f"<{(len(payload) - HEADER) // 4}f", payload[HEADER:])
        lines += [
            _line("value", payload[40 + 4 * i : 44 + 4 * i], f"{v!r}") for i, v in enumerate(values)
        ]
    else:
        for name, data in sections(payload).items():
            lines += _section(name, data)
    return "\n".join(lines) + "\n"


def parse(text: str) -> bytes:
    """The payload that `explain` explained."""
    return bytes.fromhex("".join(line[24:64] for line in text.splitlines() if line[0] != "#"))


def _line(name: str, data: bytes, meaning: str) -> str:
    assert len(data) <= 13
    return f"{name:24}{data.hex(' '):40}{meaning}".rstrip()


def _lines(name: str, data: bytes, meaning: str) -> list[str]:
    rows = [data[i : i + 13] for i in range(0, len(data), 13)] or [b""]
    return [_line(name, rows[0], meaning), *(_line("", row, "") for row in rows[1:])]


def _field(payload: bytes, name: str) -> str:
    offset, form = FIELDS[name]
    (value,) = struct.unpack_from(form, payload, offset)
    return _line(name, payload[offset : offset + struct.calcsize(form)], f"{value}")


def _section(name: str, data: bytes) -> list[str]:
    if name == "signs":
        return _lines(name, data, "1 = negative, lowest bit first: " + _bits(data))
    head = []
    if name != "gaps":
        values = Body(data).stream(None)
        shown = [signed(v) for v in values] if name in ("counts", "low") else values
        head = [_line(f"{name} parameter", data[:1], f"{data[0]}; these values: {shown}")]
        data = data[1:]
    size = int.from_bytes(data[:4], "little")
    unary, binary = data[4 : 4 + size], data[4 + size :]
    return [
        *head,
        _line(f"{name} unary bytes", data[:4], str(size)),
        *_lines(f"{name} unary", unary, _bits(unary)),
        *_lines(f"{name} binary", binary, _bits(binary)),
    ]


def _bits(data: bytes) -> str:
    return " ".join(f"{byte:08b}"[::-1] for byte in data)
