"""Push over real gRPC: what is accepted, what is refused, and what lies on disk after it.

Compared with: the bytes sent, the machine's state and the files of the state directory. Run alone:
pytest tests/coordinator/test_push.py
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import grpc
import numpy as np
import pytest
from support.live import Coordinator, Member, coordinating, eventually, refusal
from support.runs import LAYOUT, config_of, create_store, shard_body, vector

from coordinator import finish
from loco import codec
from loco.codec.header import _FIELDS, DENSE_BITS, MAGIC, VERSION, checksum, write_header
from loco.digest import bytes_digest
from loco.layout import CHUNK, Layout
from loco.wire.blocks import make_block
from loco.wire.v1 import coordinator_pb2 as pb

Harm = Callable[[bytes], bytes]
CONFIG = config_of(quorum={"min_sites": 2}, run={"rounds": 3})


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    with coordinating(create_store(tmp_path, CONFIG)) as running:
        yield running


@pytest.fixture
def paris(coordinator: Coordinator) -> Iterator[Member]:
    """A site in the open round 0, which waits for oslo too."""
    with Member(coordinator, "paris") as paris, Member(coordinator, "oslo") as oslo:
        paris.enter()
        oslo.enter()
        yield paris


def body_of(seed: int = 1) -> bytes:
    return shard_body(vector(LAYOUT, seed), CONFIG)


def files(coordinator: Coordinator, kind: str = "contributions") -> list[bytes]:
    """Every contribution on disk, or every upload in progress (`incoming`)."""
    found = (coordinator.store.directory / kind).rglob("*")
    return [path.read_bytes() for path in sorted(found) if path.is_file()]


def begun(coordinator: Coordinator) -> None:
    """Wait until the first bytes of an upload are on disk."""
    eventually(lambda: any(files(coordinator, "incoming")), "the upload has begun")


class Streaming:
    """A push whose blocks the test hands over one by one."""

    def __init__(self, member: Member, header: pb.PushHeader) -> None:
        self._blocks: list[bytes | None] = []
        self._more = threading.Semaphore(0)
        self.answer: Future[pb.PushResponse] = member.stub.Push.future(self._messages(header))

    def _messages(self, header: pb.PushHeader) -> Iterator[pb.PushRequest]:
        yield pb.PushRequest(header=header)
        while True:
            self._more.acquire()
            data = self._blocks.pop(0)
            if data is None:
                return
            yield pb.PushRequest(block=make_block(data))

    def send(self, *blocks: bytes | None) -> None:
        """Hand over blocks; None ends the stream."""
        for block in blocks:
            self._blocks.append(block)
            self._more.release()


def test_an_accepted_shard_lies_on_disk_as_it_was_sent(
    coordinator: Coordinator, paris: Member
) -> None:
    body = body_of()
    assert not paris.push(0, body).duplicate
    assert files(coordinator) == [body]
    assert coordinator.state.complete == ("paris",)


def test_a_repeat_is_answered_without_its_bytes(coordinator: Coordinator, paris: Member) -> None:
    body = body_of()
    paris.push(0, body)
    header = paris.header(0, body)
    assert paris.send(header, b"").duplicate
    assert coordinator.state.complete == ("paris",)


def test_blocks_of_any_size_make_the_same_shard(coordinator: Coordinator, paris: Member) -> None:
    body = body_of()
    paris.send(paris.header(0, body), body, block_bytes=7)
    assert files(coordinator) == [body]


def test_a_small_shard_comes_with_its_header_in_one_message(
    coordinator: Coordinator, paris: Member
) -> None:
    body = body_of()
    message = pb.PushRequest(header=paris.header(0, body), block=make_block(body))
    assert not paris.stub.Push(iter([message]), timeout=20).duplicate
    assert files(coordinator) == [body]


def test_a_whole_shard_is_answered_though_its_stream_stays_open(
    coordinator: Coordinator, paris: Member
) -> None:
    body = body_of()
    open_stream = Streaming(paris, paris.header(0, body))
    open_stream.send(body)
    assert not open_stream.answer.result(timeout=20).duplicate
    open_stream.send(None)
    assert files(coordinator) == [body]


def test_a_push_beyond_the_message_ceiling_of_grpc(tmp_path: Path) -> None:
    """4 MB is gRPC's default limit of a message; a contribution is many messages."""
    layout = Layout.of([("a", (1500, 1024)), ("b", ())])
    config = config_of(codec={"bits": 32})
    store = create_store(tmp_path, config, layout=layout)
    body = shard_body(vector(layout, 1), config, layout=layout)
    assert len(body) > 6_000_000
    with coordinating(store) as coordinator, Member(coordinator, "paris") as paris:
        paris.enter()
        paris.push(0, body)
        eventually(lambda: coordinator.state.round == 1, "the round is committed")
        update = paris.wait(0, coordinator.state.digests[0])
        assert update.update_bytes > 6_000_000
        assert len(paris.pull(0, 0, update.update_bytes)) == update.update_bytes


def extended(body: bytes) -> bytes:
    return body + b"x"


def flipped(body: bytes) -> bytes:
    return bytes([body[0] ^ 1]) + body[1:]


@pytest.mark.parametrize("harm", [extended, flipped])
def test_bytes_that_are_not_as_declared_are_refused_as_corrupt(
    coordinator: Coordinator, paris: Member, harm: Harm
) -> None:
    body = body_of()
    with pytest.raises(grpc.RpcError) as caught:
        paris.send(paris.header(0, body), harm(body))
    reason, message = refusal(caught.value)
    assert reason == "corrupt"
    assert "shard 0 of 'paris'" in message
    assert f"{len(body)} bytes" in message
    assert files(coordinator) == []
    assert coordinator.metric("loco_rejections_total", reason="corrupt") == 1
    assert not paris.push(0, body).duplicate  # and the right bytes are welcome


@pytest.mark.parametrize("sent", [0, 1, 100])
def test_a_stream_that_ends_early_is_to_be_continued(
    coordinator: Coordinator, paris: Member, sent: int
) -> None:
    """A broken connection looks just like it: no strike against the site, and no byte twice."""
    body = body_of()
    with pytest.raises(grpc.RpcError) as caught:
        paris.send(paris.header(0, body), body[:sent])
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert f"{sent} of {len(body)} bytes are here" in str(caught.value.details())
    assert coordinator.state.sites["paris"].refusals == 0
    asked = pb.PushOffsetRequest(header=paris.header(0, body))
    assert paris.stub.PushOffset(asked).offset == sent
    assert not paris.send(paris.header(0, body, offset=sent), body[sent:]).duplicate
    assert files(coordinator) == [body]


def half_a_header(body: bytes) -> bytes:
    return body[: codec.HEADER_BYTES - 1]


def wrong_kind(body: bytes) -> bytes:
    return codec.encode_dense(vector(LAYOUT, 1)).payload


def wrong_number_of_elements(body: bytes) -> bytes:
    return codec.encode(vector(LAYOUT, 1)[CHUNK:]).payload


def huge_number_of_elements(body: bytes) -> bytes:
    """A valid header that promises 2^40 elements and 2^42 bytes: nothing of it may be allocated."""
    count = 1 << 40
    length = codec.HEADER_BYTES + 4 * count
    start = _FIELDS.pack(MAGIC, VERSION, DENSE_BITS, 0, 0, count, count, length, 0, 0)[:-4]
    return start + checksum(start).to_bytes(4, "little")


def bytes_after_the_last_payload(body: bytes) -> bytes:
    return body + body


def flipped_value(body: bytes) -> bytes:
    return body[:-1] + bytes([body[-1] ^ 0x80])


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (half_a_header, "truncated"),
        (wrong_kind, "32-bit payload"),
        (wrong_number_of_elements, "wrong_size"),
        (huge_number_of_elements, "wrong_size"),
        (bytes_after_the_last_payload, "trailing_bytes"),
        (flipped_value, "bad_checksum"),
    ],
)
def test_a_malformed_payload_is_refused_with_the_reason_of_the_codec(
    coordinator: Coordinator, paris: Member, harm: Harm, told: str
) -> None:
    """The digest of the transfer is right: the bytes are what the site meant to send."""
    with pytest.raises(grpc.RpcError) as caught:
        paris.push(0, harm(body_of()))
    reason, message = refusal(caught.value)
    assert reason == "payload"
    assert "shard 0 of 'paris' is malformed" in message
    assert told in message
    assert files(coordinator) == []
    assert coordinator.state.complete == ()


def test_a_contribution_that_is_not_finite_is_refused_and_the_round_goes_on(tmp_path: Path) -> None:
    """Checksums right: a site that computes NaN and does not look."""
    config = config_of(codec={"bits": 32}, quorum={"min_sites": 1})
    with (
        coordinating(create_store(tmp_path, config)) as coordinator,
        Member(coordinator, "paris") as paris,
    ):
        paris.enter()
        right = shard_body(vector(LAYOUT, 1), config)
        values = np.frombuffer(right[codec.HEADER_BYTES :], np.float32).copy()
        values[4096] = np.nan
        header = write_header(
            bits=32,
            chunk=0,
            k=0,
            num_elements=len(values),
            num_values=len(values),
            body=values.tobytes(),
        )
        with pytest.raises(grpc.RpcError) as caught:
            paris.push(0, header + values.tobytes())
        reason, message = refusal(caught.value)
        assert reason == "absurd"
        assert "'paris' has nan in block.weight" in message
        assert coordinator.state.complete == ()
        paris.push(0, right)
        eventually(lambda: coordinator.state.round == 1, "the round is committed")


def test_a_shard_of_more_bytes_than_fit_its_rows_is_refused_before_it_is_read(
    coordinator: Coordinator, paris: Member
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        paris.push(0, b"", size_bytes=1 << 40)
    reason, message = refusal(caught.value)
    assert reason == "shard"
    assert str(1 << 40) in message
    assert files(coordinator) == []


def test_of_two_uploads_of_one_key_the_first_to_end_counts(
    coordinator: Coordinator, paris: Member
) -> None:
    """Both pass the checks of the header; the slower one must not touch the accepted file."""
    first, second = body_of(1), body_of(2)
    slow = Streaming(paris, paris.header(0, second))
    slow.send(second[:10])
    begun(coordinator)
    paris.push(0, first)
    slow.send(second[10:], None)
    with pytest.raises(grpc.RpcError) as caught:
        slow.answer.result(timeout=20)
    assert refusal(caught.value)[0] == "conflict"
    assert files(coordinator) == [first]


def test_a_malformed_upload_beside_the_right_one_does_no_harm(
    coordinator: Coordinator, paris: Member
) -> None:
    body = body_of()
    bad = body + body
    slow = Streaming(paris, paris.header(0, bad))
    slow.send(bad[:10])
    begun(coordinator)
    slow.send(bad[10:], None)
    paris.push(0, body)
    with pytest.raises(grpc.RpcError) as caught:
        slow.answer.result(timeout=20)
    assert refusal(caught.value)[0] in ("payload", "conflict")
    assert files(coordinator) == [body]


def test_the_same_shard_uploaded_twice_at_once_counts_once(
    coordinator: Coordinator, paris: Member
) -> None:
    """A connection breaks, the site tries again, and the first handler still runs."""
    body = body_of()
    slow = Streaming(paris, paris.header(0, body))
    slow.send(body[:10])
    begun(coordinator)
    assert not paris.push(0, body).duplicate
    slow.send(body[10:], None)
    with pytest.raises(grpc.RpcError) as caught:  # nobody waits for its answer any more
        slow.answer.result(timeout=20)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert files(coordinator) == [body]
    assert coordinator.state.contributions["paris"].size_bytes == len(body)


def test_an_upload_that_breaks_off_may_begin_anew(coordinator: Coordinator, paris: Member) -> None:
    body = body_of()
    broken = Streaming(paris, paris.header(0, body))
    broken.send(body[:10])
    begun(coordinator)
    broken.answer.cancel()
    broken.send(None)

    def push() -> pb.PushResponse | None:
        """As a site does: UNAVAILABLE, while the broken stream is still ending, is tried again."""
        try:
            return paris.push(0, body)
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE:
                raise
            return None

    answer = eventually(push, "the shard is taken")
    assert not answer.duplicate  # from the first byte, over what had come
    assert files(coordinator) == [body]


def test_the_last_write_of_a_stream_that_is_gone_comes_before_those_of_the_next(
    coordinator: Coordinator, paris: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread cannot be stopped; after them it would damage what was checked and accepted."""
    write_at, begun, go_on = finish.write_at, threading.Event(), threading.Event()

    def slowly(path: Path, offset: int, data: bytes) -> None:
        if not begun.is_set():
            begun.set()
            assert go_on.wait(20)
        write_at(path, offset, data)

    monkeypatch.setattr(finish, "write_at", slowly)
    body = body_of()
    gone = Streaming(paris, paris.header(0, body))
    gone.send(body[:10])
    assert begun.wait(20)
    gone.answer.cancel()
    gone.send(None)
    message = pb.PushRequest(header=paris.header(0, body), block=make_block(body))
    later = paris.stub.Push.future(iter([message]), timeout=20)
    with pytest.raises(grpc.FutureTimeoutError):
        later.result(timeout=1.0)
    go_on.set()
    assert not later.result().duplicate
    assert files(coordinator) == [body]


def test_a_slow_upload_is_refused_as_stale_as_soon_as_its_round_is_closed(tmp_path: Path) -> None:
    """Although the bytes that had come are gone, and before all of them have come."""
    config = config_of(quorum={"min_sites": 1, "grace_seconds": 0.3})
    with (
        coordinating(create_store(tmp_path, config)) as coordinator,
        Member(coordinator, "paris") as paris,
        Member(coordinator, "oslo") as oslo,
    ):
        paris.join()
        oslo.join()
        paris.wait(0)
        oslo.wait(0)
        body = body_of()
        slow = Streaming(paris, paris.header(0, body))
        slow.send(body[:10])
        begun(coordinator)
        oslo.push(0, body_of(2))
        eventually(lambda: coordinator.state.round == 1, "the round is committed without paris")
        eventually(lambda: not (tmp_path / "incoming" / "0").exists(), "its uploads are gone")
        slow.send(body[10:20])  # not the end of the stream
        with pytest.raises(grpc.RpcError) as caught:
            slow.answer.result(timeout=20)
        slow.send(None)
        assert refusal(caught.value)[0] == "stale_round"


def test_a_stream_that_begins_behind_what_is_there_cuts_the_rest_off(
    coordinator: Coordinator, paris: Member
) -> None:
    """The old stream wrote on after the new one had asked for the offset."""
    body = body_of()
    broken = Streaming(paris, paris.header(0, body))
    broken.send(body[:20])
    begun(coordinator)
    header = paris.header(0, body, offset=15)
    assert not paris.send(header, body[15:]).duplicate
    broken.send(None)
    assert files(coordinator) == [body]
    assert coordinator.state.sites["paris"].refusals == 0


def test_an_upload_survives_that_the_directory_of_its_round_goes(
    coordinator: Coordinator, paris: Member
) -> None:
    body = body_of()
    slow = Streaming(paris, paris.header(0, body))
    slow.send(body[:10])
    begun(coordinator)
    shutil.rmtree(coordinator.store.directory / "contributions")
    slow.send(body[10:], None)
    assert slow.answer.result(timeout=20) == pb.PushResponse()
    assert files(coordinator) == [body]


def test_a_site_in_the_middle_of_an_upload_is_alive(tmp_path: Path) -> None:
    """Without a heartbeat for longer than `dead_after_seconds`, while blocks trickle in."""
    config = config_of(quorum={"min_sites": 1, "heartbeat_seconds": 1.0, "dead_after_seconds": 2.0})
    with (
        coordinating(create_store(tmp_path, config)) as coordinator,
        Member(coordinator, "paris") as paris,
    ):
        paris.enter()
        body = body_of()
        slow = Streaming(paris, paris.header(0, body))
        for i in range(16):
            slow.send(body[i : i + 1])
            time.sleep(0.25)
        assert coordinator.state.sites["paris"].status == "ready"
        slow.send(body[16:], None)
        assert slow.answer.result(timeout=20) == pb.PushResponse()


def test_ranks_upload_their_shards_in_any_order(tmp_path: Path) -> None:
    with (
        coordinating(create_store(tmp_path, CONFIG)) as coordinator,
        Member(coordinator, "paris", ranks=3) as paris,
        Member(coordinator, "oslo") as oslo,
    ):
        paris.enter()
        oslo.enter()
        a = vector(LAYOUT, 1)
        for rank in (2, 0, 1):
            assert coordinator.state.complete == ()
            paris.push(0, shard_body(a, CONFIG, rank=rank, ranks=3), shard=rank)
        assert coordinator.state.complete == ("paris",)
        assert coordinator.state.contributions["paris"].digests.keys() == {0, 1, 2}


def test_a_push_begins_with_its_header(paris: Member) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        paris.stub.Push(iter([pb.PushRequest(block=make_block(b"x"))]))
    assert refusal(caught.value)[0] == "corrupt"
    with pytest.raises(grpc.RpcError) as caught:
        paris.stub.Push(iter([]))
    assert refusal(caught.value)[0] == "corrupt"


def test_weights_are_tokens_and_none_is_zero(coordinator: Coordinator, paris: Member) -> None:
    """A total weight of zero would stop the reducer, now and after every restart."""
    with pytest.raises(grpc.RpcError) as caught:
        paris.push(0, body_of(), tokens=0)
    reason, message = refusal(caught.value)
    assert reason == "shard"
    assert "0 tokens" in message
    assert coordinator.state.complete == ()


def test_digests_of_a_push_are_those_of_its_bytes(coordinator: Coordinator, paris: Member) -> None:
    body = body_of()
    paris.push(0, body)
    (have,) = coordinator.state.contributions.values()
    assert have.digests == {0: bytes_digest(body).hex()}
    assert have.size_bytes == len(body)
