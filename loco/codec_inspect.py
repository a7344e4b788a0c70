"""`loco inspect`: what a file of payloads (a contribution, an update) holds, part by part.

`describe` is pure and returns what `--json` prints; `lines` makes text of it. NumPy and the codec
are imported when they are needed, because the command line imports this module.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loco.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from loco.codec.header import Header
    from loco.codec.selection import Selection

    Floats = npt.NDArray[np.float32]


def inspect(
    file: Annotated[str, typer.Argument(help="File of payloads, or - for standard input.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    original: Annotated[
        Path | None,
        typer.Option(help="What was encoded (.npy, or raw little-endian fp32): report the error."),
    ] = None,
) -> None:
    """Show what a contribution or an update holds: header, levels, bits a value by part."""
    data = sys.stdin.buffer.read() if file == "-" else _read(Path(file))
    found = describe(data, None if original is None else _load(original))
    typer.echo(json.dumps(found) if as_json else "\n".join(lines(found)))


def describe(data: bytes, original: Floats | None = None) -> dict[str, Any]:
    """One entry a payload, and totals; `original` [all elements] fp32 adds the error.

    Raises:
        PayloadError: a payload is malformed.
        ConfigError: `original` has another number of elements than the payloads.
    """
    from loco.codec import payload_length

    payloads, at, element = [], 0, 0
    while at < len(data):
        length = payload_length(data[at:])
        found = _describe_one(data[at : at + length], _part(original, element, data[at:]))
        payloads.append({"offset": at, **found})
        at += length
        element += found["num_elements"]
    if original is not None and len(original) != element:
        raise ConfigError(f"--original has {len(original)} elements, the payloads {element}")
    num_values = sum(p["num_values"] for p in payloads)
    return {
        "bytes": len(data),
        "num_elements": element,
        "num_values": num_values,
        "bits_per_value": _per(8 * len(data), num_values),
        "payloads": payloads,
    }


def lines(found: dict[str, Any]) -> list[str]:
    """`describe`'s answer as text."""
    text = [
        f"{len(found['payloads'])} payloads, {found['bytes']} bytes, {found['num_values']} of "
        f"{found['num_elements']} elements, {found['bits_per_value']:.3f} bits a value"
    ]
    for number, p in enumerate(found["payloads"]):
        per_chunk = f"k = {p['k']}" if p["k"] else "k differs by chunk"
        kind = (
            "dense fp32"
            if p["bits"] == 32
            else f"{p['bits']} bits, chunk {p['chunk']}, {per_chunk}"
        )
        text.append(f"payload {number} at {p['offset']}: version {p['version']}, {kind}")
        text.append(f"  {p['num_values']} of {p['num_elements']} elements, {p['length']} bytes")
        for name in ("bits_per_value_by_part", "counts", "values", "levels_by_octave", "error"):
            if name in p:
                pairs = ", ".join(f"{key} {_short(value)}" for key, value in p[name].items())
                text.append(f"  {name.replace('_', ' ')}: {pairs}")
    return text


def _describe_one(payload: bytes, original: Floats | None) -> dict[str, Any]:
    from loco import codec
    from loco.codec.body import read_body
    from loco.codec.header import DENSE_BITS
    from loco.codec.payload import open_payload

    header, body = open_payload(payload, codec.peek(payload).num_elements)
    found: dict[str, Any] = {
        name: getattr(header, name)
        for name in ("version", "bits", "chunk", "k", "num_elements", "num_values", "length")
    }
    found["bits_per_value"] = _per(8 * header.length, header.num_values)
    if header.bits != DENSE_BITS:
        selection, sizes = read_body(header, body)
        found |= _describe_selection(header, selection, sizes)
    if original is not None:
        found["error"] = _error(codec.decode(payload, header.num_elements), original)
    return found


def _describe_selection(
    header: Header, selection: Selection, sizes: dict[str, int]
) -> dict[str, Any]:
    import numpy as np

    from loco.codec import HEADER_BYTES
    from loco.codec.selection import level_values

    counts, high = selection.counts, selection.high
    parts = {"header": HEADER_BYTES, **sizes}
    octaves = np.frexp(level_values(selection.levels[counts > 0]))[1] - 1
    of_levels = zip(*np.unique(octaves, return_counts=True), strict=True)
    minus, plus = selection.negative, ~selection.negative
    return {
        "bits_per_value_by_part": {k: _per(8 * v, header.num_values) for k, v in parts.items()},
        "counts": {
            "least": int(counts.min(initial=header.chunk)),
            "most": int(counts.max(initial=0)),
            "empty_chunks": int((counts == 0).sum()),
            "chunks": len(counts),
        },
        "values": {
            "-upper": int((minus & high).sum()),
            "-lower": int((minus & ~high).sum()),
            "+lower": int((plus & ~high).sum()),
            "+upper": int((plus & high).sum()),
        },
        "levels_by_octave": {f"2^{octave}": int(count) for octave, count in of_levels},
    }


def _error(decoded: Any, original: Floats) -> dict[str, float]:
    """Squared errors relative to the energy of what was sent, and of everything."""
    import numpy as np

    sent = original[decoded.indices].astype(np.float64)
    all_energy = float(np.sum(original.astype(np.float64) ** 2))
    sent_energy = float(np.sum(sent**2))
    lost = float(np.sum((sent - decoded.values) ** 2))
    return {
        "relative_error_of_sent": _per(lost, sent_energy),
        "energy_sent": _per(sent_energy, all_energy),
        "relative_error_of_all": _per(all_energy - sent_energy + lost, all_energy),
    }


def _part(original: Floats | None, element: int, payload: bytes) -> Floats | None:
    if original is None:
        return None
    from loco.codec import peek

    stop = element + peek(payload).num_elements
    if stop > len(original):
        raise ConfigError(f"--original has {len(original)} elements, the payloads at least {stop}")
    return original[element:stop]


def _per(amount: float, number: float) -> float:
    return amount / number if number else 0.0


def _short(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _load(path: Path) -> Floats:
    import numpy as np

    data = _read(path)
    if path.suffix != ".npy":
        if len(data) % 4:
            raise ConfigError(f"{path} has {len(data)} bytes: fp32 numbers have 4 each")
        return np.frombuffer(data, "<f4")
    found = np.load(path, allow_pickle=False)
    if found.dtype != np.float32:
        raise ConfigError(f"{path} holds {found.dtype}: float32 is needed")
    flat: Floats = found.reshape(-1)
    return flat
