"""A decoder of payloads written from docs/protocol.md alone: plain Python integers, no NumPy.

It knows nothing of `loco.codec`, and takes sound payloads only: it is the oracle of the format.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass


@dataclass
class Bits:
    """A string of bits that fills bytes from the lowest bit."""

    data: bytes
    at: int = 0

    def take(self, count: int) -> int:
        value = 0
        for i in range(count):
            value |= (self.data[self.at >> 3] >> (self.at & 7) & 1) << i
            self.at += 1
        return value

    def zeros_before_a_one(self) -> int:
        zeros = 0
        while not self.take(1):
            zeros += 1
        return zeros


@dataclass
class Body:
    """The sections of a body, taken from its start."""

    data: bytes
    at: int = 0

    def bytes(self, count: int) -> bytes:
        self.at += count
        return self.data[self.at - count : self.at]

    def codes(self, parameters: list[int]) -> list[int]:
        unary = Bits(self.bytes(int.from_bytes(self.bytes(4), "little")))
        binary = Bits(self.bytes((sum(parameters) + 7) // 8))
        return [unary.zeros_before_a_one() << r | binary.take(r) for r in parameters]

    def stream(self, count: int | None) -> list[int]:
        r = self.bytes(1)[0]
        if count is None:
            size = int.from_bytes(self.data[self.at : self.at + 4], "little")
            unary = self.data[self.at + 4 : self.at + 4 + size]
            count = sum(byte.bit_count() for byte in unary)
        return self.codes([r] * count)


def signed(code: int) -> int:
    """Zigzag: 0, 1, 2, 3, ... is 0, -1, 1, -2, ..."""
    return -(code + 1) // 2 if code & 1 else code // 2


def usual_parameter(count: int, length: int) -> int:
    return ((64 * (2 * length - count) - 1) // (266 * count)).bit_length()


def number(level: int) -> float:
    """A level code is the upper 13 bits of a positive single-precision number (sign left out)."""
    return float(struct.unpack("<f", struct.pack("<I", level << 18))[0])


def decode(payload: bytes) -> dict[int, float]:
    """Value by flat index."""
    _, _, bits, chunk, k, num_elements, num_values, length, _, _ = struct.unpack(
        "<2sBBHHQQQII", payload[:40]
    )
    assert length == len(payload)
    body = Body(payload[40:])
    if bits == 32:
        return dict(enumerate(struct.unpack(f"<{num_elements}f", body.data)))
    lengths = [min(chunk, num_elements - start) for start in range(0, num_elements, chunk)]
    counts = read_counts(body, k, lengths)
    sending = [i for i, count in enumerate(counts) if count]
    low, levels = 127 << 5, {}
    for i, difference in zip(sending, body.stream(len(sending)), strict=True):
        low += signed(difference)
        levels[i] = [low, low]
    if bits == 2:
        for i, spread in zip(sending, body.stream(len(sending)), strict=True):
            levels[i][1] += spread
    high = read_highs(body) if bits == 2 else set()
    signs = Bits(body.bytes((num_values + 7) // 8))
    drops = dict(zip(sending, body.stream(len(sending)), strict=True))
    parameters = [
        usual_parameter(counts[i], lengths[i]) - drops[i] for i in sending for _ in range(counts[i])
    ]
    gaps = iter(body.codes(parameters))
    values, v = {}, 0
    for i in sending:
        position = -1
        for _ in range(counts[i]):
            position += next(gaps) + 1
            magnitude = number(levels[i][v in high])
            values[i * chunk + position] = -magnitude if signs.take(1) else magnitude
            v += 1
    assert body.at == len(body.data)
    return values


def read_counts(body: Body, k: int, lengths: list[int]) -> list[int]:
    if k:
        return [min(k, length) for length in lengths]
    counts, count = [], 0
    for difference in body.stream(len(lengths)):
        count += signed(difference)
        counts.append(count)
    return counts


def read_highs(body: Body) -> set[int]:
    high, at = set(), -1
    for gap in body.stream(None):
        at += gap + 1
        high.add(at)
    return high
