"""Frames and tensors between ranks: what is damaged is refused by name, and nothing is unpickled.

Compared with: what was sent, bit for bit. Run alone: pytest tests/worker/elastic/test_wire.py
"""

from __future__ import annotations

import ast
import contextlib
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from worker.elastic import wire

TENSORS = [
    torch.randn(3, 700_001),
    torch.randn(()),
    torch.empty(0),
    torch.arange(5),
    torch.tensor([True, False, True]),
    torch.randn(17, dtype=torch.float64).to(torch.bfloat16),
]


@contextlib.contextmanager
def received(
    send: Callable[[socket.socket], None], damage: Callable[[bytearray], None] | None = None
) -> Iterator[socket.socket]:
    """The receiving end of what `send` sends, after `damage`."""
    data = bytearray()
    source, relay = socket.socketpair()
    with source, relay, ThreadPoolExecutor(2) as threads:
        sending = threads.submit(lambda: (send(source), source.shutdown(socket.SHUT_WR)))
        while piece := relay.recv(1 << 16):
            data += piece
        sending.result()
        if damage is not None:
            damage(data)
        out, sink = socket.socketpair()
        with out, sink:
            sink.settimeout(10.0)
            threads.submit(lambda: (out.sendall(data), out.shutdown(socket.SHUT_WR)))
            yield sink


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda t: f"{t.dtype}-{tuple(t.shape)}")
def test_a_tensor_comes_as_it_went(tensor: torch.Tensor) -> None:
    into = torch.empty_like(tensor)
    with received(lambda to: wire.send_tensor(to, tensor)) as peer:
        assert wire.receive_tensor(peer, into, "x") == tensor.nbytes
    assert torch.equal(into, tensor)


def test_only_pieces_that_are_not_there_follow() -> None:
    """What was fetched beside training is compared by piece; one of three has changed since."""
    tensor = torch.randn(3 * wire.PIECE_BYTES // 4 - 100)
    into = tensor.clone()
    into[wire.PIECE_BYTES // 4 + 5] += 1.0
    known = wire.piece_digests(into)
    with received(lambda to: wire.send_tensor(to, tensor, known)) as peer:
        assert wire.receive_tensor(peer, into, "x", known) == wire.PIECE_BYTES
    assert torch.equal(into, tensor)


def flip(position: int) -> Callable[[bytearray], None]:
    def damage(data: bytearray) -> None:
        data[position] ^= 4

    return damage


@pytest.mark.parametrize("position", [0, 4096, -1])
def test_a_flipped_bit_is_refused_by_the_tensors_name(position: int) -> None:
    tensor = torch.randn(5000)
    with (
        received(lambda to: wire.send_tensor(to, tensor), flip(position)) as peer,
        pytest.raises(wire.WireError, match="inner 3 came with another digest"),
    ):
        wire.receive_tensor(peer, torch.empty(5000), "inner 3")


def test_a_flipped_bit_in_a_frame_is_refused() -> None:
    with (
        received(lambda to: wire.send_frame(to, {"kind": "ping"}), flip(-2)) as peer,
        pytest.raises(wire.WireError, match="another digest"),
    ):
        wire.receive_frame(peer)


def test_a_frame_that_claims_too_much_allocates_nothing() -> None:
    with (
        received(lambda to: to.sendall(b"\xff" * 20)) as peer,
        pytest.raises(wire.WireError, match="at most"),
    ):
        wire.receive_frame(peer)


def test_an_end_in_the_middle_is_a_lost_connection() -> None:
    def cut(data: bytearray) -> None:
        del data[1000:]

    with (
        received(lambda to: wire.send_tensor(to, torch.randn(5000)), cut) as peer,
        pytest.raises(ConnectionError),
    ):
        wire.receive_tensor(peer, torch.empty(5000), "x")


def test_nothing_between_ranks_is_pickled_and_of_torchft_only_membership_is_used() -> None:
    """Its Manager unpickles, its DiLoCo loses buckets, its baby groups take seconds a step."""
    forbidden = {"pickle", "torchft", "shelve", "dill"}
    allowed = {"torchft.coordination", "torchft.process_group"}
    for path in (Path(wire.__file__).parents[1]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not forbidden & set(names), f"{path.name} imports {names}"
            of_torchft = {name for name in names if name.startswith("torchft.")}
            assert of_torchft <= allowed, f"{path.name} imports {of_torchft}"
            if of_torchft and isinstance(node, ast.ImportFrom):
                assert not any("Baby" in alias.name for alias in node.names), path
