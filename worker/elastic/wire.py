"""Frames and tensors over a socket between the ranks of one site: no pickle, everything checked.

A frame is its length (4 bytes, big-endian), XXH3-128 of its bytes (16) and JSON. A tensor is its
raw little-endian bytes in pieces of 1 MiB, each after its XXH3-128; what it is was said in a frame
before. A piece that the receiver has said it has, by that digest, does not follow.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from loco.errors import LocoError

MAX_FRAME_BYTES = 64 * 1024 * 1024
PIECE_BYTES = 1 << 20
_HEAD = struct.Struct(">I16s")


class WireError(LocoError):
    """What came is damaged, or not what this end speaks."""


def send_frame(to: socket.socket, message: dict[str, Any]) -> None:
    """Send one JSON object."""
    data = json.dumps(message, separators=(",", ":")).encode()
    to.sendall(_HEAD.pack(len(data), xxhash.xxh3_128_digest(data)) + data)


def receive_frame(of: socket.socket) -> dict[str, Any]:
    """The next JSON object.

    Raises:
        WireError: damaged, or too large.
        ConnectionError, TimeoutError: the other end is gone, or says nothing.
    """
    size, digest = _HEAD.unpack(_receive(of, _HEAD.size))
    if size > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {size} bytes came; at most {MAX_FRAME_BYTES} are allowed")
    data = _receive(of, size)
    if xxhash.xxh3_128_digest(data) != digest:
        raise WireError(f"a frame of {size} bytes came with another digest than it left with")
    message = json.loads(data)
    if not isinstance(message, dict):
        raise WireError("a frame came that is no object")
    return message


def send_tensor(to: socket.socket, tensor: Tensor, known: Sequence[str] = ()) -> None:
    """Send the elements of a tensor on any device.

    It may change meanwhile: each piece is one state of its bytes, two pieces perhaps of two.

    Args:
        known: `piece_digests` of what the receiver has, hex.
    """
    for number, piece in enumerate(_pieces(tensor.detach().cpu().contiguous())):
        data = bytes(piece)
        digest = xxhash.xxh3_128_digest(data)
        here = number < len(known) and known[number] == digest.hex()
        to.sendall(digest if here else digest + data)


def receive_tensor(of: socket.socket, into: Tensor, name: str, known: Sequence[str] = ()) -> int:
    """Fill `into`, contiguous and on the CPU, in place.

    Args:
        known: `piece_digests` of `into`, hex, as the sender was told.

    Returns:
        Bytes that came.

    Raises:
        WireError: a digest is another; names the tensor.
    """
    came = 0
    for number, piece in enumerate(_pieces(into)):
        digest = _receive(of, 16)
        if number < len(known) and known[number] == digest.hex():
            continue
        _receive_into(of, piece)
        if xxhash.xxh3_128_digest(piece) != digest:
            raise WireError(f"{name} came with another digest than it left with; nothing was used")
        came += len(piece)
    return came


def piece_digests(tensor: Tensor) -> list[str]:
    """XXH3-128 of each piece of a contiguous tensor on the CPU, hex."""
    return [xxhash.xxh3_128_hexdigest(piece) for piece in _pieces(tensor)]


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    view = _bytes_of(tensor)
    for start in range(0, len(view), PIECE_BYTES):
        yield view[start : start + PIECE_BYTES]


def digest_of(tensors: list[Tensor]) -> str:
    """XXH3-128 over the bytes of all tensors in order, hex."""
    digest = xxhash.xxh3_128()
    for tensor in tensors:
        digest.update(_bytes_of(tensor.detach().cpu().contiguous()))
    return digest.hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU; an empty one has none."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _receive(of: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    _receive_into(of, memoryview(data))
    return bytes(data)


def _receive_into(of: socket.socket, view: memoryview) -> None:
    filled = 0
    while filled < len(view):
        count = of.recv_into(view[filled:])
        if count == 0:
            raise ConnectionError("the other end has closed the connection")
        filled += count
