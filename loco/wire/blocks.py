"""Blocks of a transfer, with a checksum each, so that damage is noticed where it happens."""

from __future__ import annotations

import xxhash

from loco.wire.v1 import coordinator_pb2 as pb


def make_block(data: bytes) -> pb.Block:
    """A block that carries its checksum (XXH3-64)."""
    return pb.Block(data=data, checksum=xxhash.xxh3_64_intdigest(data))


def is_sound(block: pb.Block) -> bool:
    """Whether the data have the checksum that they left with."""
    return xxhash.xxh3_64_intdigest(block.data) == block.checksum
