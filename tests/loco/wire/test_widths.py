"""Nothing that grows with a model has 32 bits or must fit in one message.

Field reports: ceilings of 4 MB, 512 MB, 2 GB. Compared with: the descriptors of the wire, and sizes
of files that are written full of holes. Run alone: pytest tests/loco/wire/test_widths.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from support.live import Member, coordinating
from support.runs import config_of, create_store

from loco.codec.header import _FIELDS
from loco.layout import CHUNK, Layout
from loco.wire.protocol import BLOCK_BYTES, CHANNEL_OPTIONS
from loco.wire.v1 import coordinator_pb2 as pb

# Counts of things of which nobody has four thousand millions.
SMALL = {
    "protocol_version", "ranks", "shard", "num_shards", "fragment", "members", "k",
}  # fmt: skip
NARROW = (
    FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_SINT32,
    FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32, FieldDescriptor.TYPE_FLOAT,
)  # fmt: skip
GIANT = 5 << 30  # bytes; beyond 2 and beyond 4 GiB


def test_no_number_of_bytes_elements_or_steps_has_32_bits() -> None:
    narrow = {
        f"{message.name}.{field.name}"
        for message in pb.DESCRIPTOR.message_types_by_name.values()
        for field in message.fields
        if field.type in NARROW and field.name not in SMALL
    }
    assert narrow == set()
    for number in (1 << 40, (1 << 64) - 1):
        _FIELDS.pack(b"lc", 1, 2, 0, 64, number, number, number, 0, 0)


def test_blocks_are_far_below_the_ceiling_of_a_message() -> None:
    (most,) = (v for name, v in CHANNEL_OPTIONS if name == "grpc.max_receive_message_length")
    assert 2 * BLOCK_BYTES < most < 4 << 20


def test_one_tensor_beyond_4_gib_has_its_place() -> None:
    """2.49 GB in one tensor ended others' runs; ours has rows before and behind it."""
    layout = Layout.of([("a", (3,)), ("w", (GIANT // 4 // 4096, 4096)), ("b", (3,))])
    _, giant, behind = layout.parameters
    assert giant.start == CHUNK
    assert behind.start == CHUNK + GIANT // 4
    assert layout.parameter_at(behind.start).name == "b"
    rows = [layout.shard(rank, 3) for rank in range(3)]
    assert sum(map(len, rows)) == layout.num_chunks


def test_a_download_reaches_bytes_beyond_4_gib(tmp_path: Path) -> None:
    """From a file of five GiB that is a hole but for its end."""
    store = create_store(tmp_path, config_of(quorum={"min_sites": 2}))
    end = np.random.default_rng(0).bytes(1000)
    path = store.update(0)
    with path.open("wb") as file:
        file.seek(GIANT)
        file.write(end)
    with coordinating(store) as coordinator, Member(coordinator, "paris") as paris:
        paris.join()
        assert paris.pull(0, GIANT, len(end)) == end
