"""What both ends of the wire agree on beside the .proto: version, block size, channel options."""

from __future__ import annotations

from google.protobuf.message import Message

from loco.errors import ConfigError
from loco.wire.v1 import coordinator_pb2 as pb

PROTOCOL_VERSION = 1

BLOCK_BYTES = 256 * 1024  # grpc.aio moves most per second with 64 KiB to 1 MiB a message
INLINE_BYTES = 64 * 1024  # a shard up to this comes with its header, in one message
INLINE_UPDATE_BYTES = 512 * 1024  # an update up to this comes with the answer that announces it
MAX_MESSAGE_BYTES = 2 * 1024 * 1024  # a block and its frame; layouts of 10,000 tensors fit

PROBE_BYTES = 8 * 1024 * 1024  # of a measurement, each way at most
PROBE_BLOCK_BYTES = 64 * 1024
PROBE_SECONDS = 2.0  # nobody sends for longer

REASON_KEY = "loco-reason"  # trailing metadata of a refusal: RefusalReason, lower case, no prefix

_MESSAGE_LIMITS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)

# Keepalive: sites ping every 30 s, also between calls; the server must allow at least that, else it
# answers a long wait with GOAWAY (too many pings).
CHANNEL_OPTIONS = (
    *_MESSAGE_LIMITS,
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)
SERVER_OPTIONS = (
    *_MESSAGE_LIMITS,
    ("grpc.so_reuseport", 0),  # else a second coordinator on the port starts silently
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


def wire_size(message: Message) -> int:
    """Bytes of a message as handed to the transport: serialised, with gRPC's 5-byte prefix."""
    return message.ByteSize() + 5


def sizes_by_kind(message: Message) -> dict[str, int]:
    """`wire_size` of an answer, by what it is: an update that comes along is no control."""
    inline = message.update.ByteSize() if isinstance(message, pb.WaitRoundResponse) else 0
    sizes = {"update": inline, "control": wire_size(message) - inline}
    return {kind: size for kind, size in sizes.items() if size}


def phase_name(phase: pb.SitePhase.ValueType) -> str:
    """`SITE_PHASE_COMPUTE` -> `compute`."""
    return pb.SitePhase.Name(phase).removeprefix("SITE_PHASE_").lower()


def split_address(address: str) -> tuple[str, int]:
    """`HOST:PORT` -> (host, port); ConfigError says what is wrong."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise ConfigError(f"{address!r} is not HOST:PORT with a port of 0 to 65535")
    return host.strip("[]"), int(port)
