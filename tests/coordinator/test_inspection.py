"""A shard that is checked as it grows, whatever the blocks in which it comes.

Compared with: the payloads decoded whole, the digest of the bytes, the codec's reason for what is
malformed. Run alone: pytest tests/coordinator/test_inspection.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.runs import config_of, shard_body, vector

from coordinator.contributions import read_payloads
from coordinator.inspection import PIECE_BYTES, Checked, Inspection
from loco import codec
from loco.codec.header import write_header
from loco.digest import bytes_digest
from loco.errors import PayloadError
from loco.layout import CELL_CHUNKS, CHUNK, Layout

# Two cells, the second one short; rows of the second rank begin in the middle of the first.
LAYOUT = Layout.of([("a", (CELL_CHUNKS + 50, CHUNK)), ("b", (5,))])
ROWS = LAYOUT.shard(1, 2)
SPARSE, DENSE = config_of(), config_of(codec={"bits": 32})
VECTOR = vector(LAYOUT, 3)
BODIES = {
    2: shard_body(VECTOR, SPARSE, layout=LAYOUT, rank=1, ranks=2),
    32: shard_body(VECTOR, DENSE, layout=LAYOUT, rank=1, ranks=2),
}


def inspect(path: Path, body: bytes, ends: list[int], bits: int) -> tuple[str, Inspection]:
    """Look whenever the file has come to one of `ends`, then at its rest."""
    inspection = Inspection(path, ROWS, bits=bits)
    path.write_bytes(b"")
    for end in sorted(ends):
        path.write_bytes(body[:end])
        inspection.advance(end)
        assert inspection.read_bytes <= end
    path.write_bytes(body)
    return inspection.finish(len(body)), inspection


def decoded_whole(path: Path) -> Checked:
    """By the reducer's way of reading, all values of a payload at once."""
    num_values, norm_sq, largest, largest_at = 0, 0.0, 0.0, 0
    for part, payload in read_payloads(path, ROWS):
        sent = codec.decode(payload, len(part) * CHUNK)
        num_values += len(sent.values)
        norm_sq += float(np.square(sent.values, dtype=np.float64).sum())
        top = int(np.argmax(np.abs(sent.values)))
        if abs(sent.values[top]) > largest:
            largest = float(abs(sent.values[top]))
            largest_at = part.start * CHUNK + int(sent.indices[top])
    return Checked(num_values=num_values, norm_sq=norm_sq, largest=largest, largest_at=largest_at)


@pytest.mark.parametrize("bits", [2, 32])
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_blocks_give_what_the_whole_shard_gives(
    tmp_path: Path, bits: int, data: st.DataObject
) -> None:
    path, body = tmp_path / "shard", BODIES[bits]
    ends = data.draw(st.lists(st.integers(0, len(body)), max_size=6))
    digest, inspection = inspect(path, body, ends, bits)
    assert digest == bytes_digest(body).hex()
    found, whole = inspection.result(), decoded_whole(path)
    assert (found.num_values, found.largest, found.largest_at) == (
        whole.num_values, whole.largest, whole.largest_at,
    )  # fmt: skip
    assert found.norm_sq == pytest.approx(whole.norm_sq, rel=1e-12)
    at_once = inspect(path, body, [], bits)[1].result()
    assert found == at_once, "theta depends on the sum where contributions are clipped"


def test_what_has_come_is_read_at_once(tmp_path: Path) -> None:
    """All but what a payload or a piece lacks."""
    path, body = tmp_path / "shard", BODIES[32]
    path.write_bytes(body)
    inspection = Inspection(path, ROWS, bits=32)
    for end in (10, 3 * PIECE_BYTES, len(body) - 1):
        inspection.advance(end)
        assert end - PIECE_BYTES < inspection.read_bytes <= end


def flipped(body: bytes) -> bytes:
    return body[:-1] + bytes([body[-1] ^ 0x80])


def cut(body: bytes) -> bytes:
    return body[:-3]


def longer(body: bytes) -> bytes:
    return body + b"x" * (2 * PIECE_BYTES)


def second_header_gone(body: bytes) -> bytes:
    first = codec.payload_length(body)
    return body[:first] + b"\0" * codec.HEADER_BYTES + body[first + codec.HEADER_BYTES :]


@pytest.mark.parametrize("bits", [2, 32])
@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (flipped, "bad_checksum"),
        (cut, "truncated"),
        (longer, "trailing_bytes"),
        (second_header_gone, "bad_magic"),
    ],
)
def test_what_is_malformed_is_told_after_the_digest(
    tmp_path: Path, bits: int, harm: Callable[[bytes], bytes], reason: str
) -> None:
    """All bytes are in the digest, though the payloads are not read on: it says who is to blame."""
    body = harm(BODIES[bits])
    half = len(body) // 2
    digest, inspection = inspect(tmp_path / "shard", body, [half, half + 1], bits)
    assert digest == bytes_digest(body).hex()
    with pytest.raises(PayloadError) as caught:
        inspection.result()
    assert caught.value.reason == reason


def test_another_width_than_the_rounds_is_malformed(tmp_path: Path) -> None:
    _, inspection = inspect(tmp_path / "shard", BODIES[32], [], 2)
    with pytest.raises(PayloadError, match="32-bit payload, this round has 2 bits"):
        inspection.result()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_first_value_that_is_not_finite_is_named(tmp_path: Path, value: float) -> None:
    """Behind a larger finite one, and before another that is none."""
    values = np.zeros(len(ROWS) * CHUNK, np.float32)
    split = (CELL_CHUNKS - ROWS.start) * CHUNK
    first = split - CHUNK + 17
    values[5], values[first], values[-1] = 1e30, value, math.nan
    body = b"".join(
        write_header(
            bits=32, chunk=0, k=0, num_elements=len(part), num_values=len(part), body=part.tobytes()
        )
        + part.tobytes()
        for part in (values[:split], values[split:])
    )
    _, inspection = inspect(tmp_path / "shard", body, [len(body) // 3], 32)
    found = inspection.result()
    assert not math.isfinite(found.largest)
    assert found.largest_at == ROWS.start * CHUNK + first
