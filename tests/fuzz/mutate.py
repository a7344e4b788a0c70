"""Requests that are almost right: from what a good site would send to what nobody should."""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from support.runs import LAYOUT, config_of, shard_body, vector

from loco.config import Config, config_from_json
from loco.digest import bytes_digest
from loco.wire.blocks import make_block
from loco.wire.protocol import PROTOCOL_VERSION
from loco.wire.v1 import coordinator_pb2 as pb

SERVICE = "/loco.wire.v1.CoordinatorService/"
WAIT_SECONDS = 0.05
_INTEGERS = (0, 1, 2, 3, 63, 64, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
_FLOATS = (0.0, -1.0, 1e-300, 1e308, math.inf, -math.inf, math.nan)
_TEXTS = ("", "x", "../../etc/passwd", "a" * 10_000, "\0", "ü\n\r", "%s%n{0}", "none", "'; --")
_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


class Mutator:
    """Makes the messages of calls; deterministic for a seed and a course of the run."""

    def __init__(self, rng: random.Random, site: str, others: Sequence[str]) -> None:
        self._random = rng
        self._site = site
        self._others = (*others, site)
        self._caller = pb.Caller(site=site)
        self._round = 0
        self._theta_digest = ""
        self._config: Config = config_of()
        self._run = pb.GetRunResponse()

    async def refresh(self, call: Callable[[str, bytes], Awaitable[bytes]]) -> None:
        """Join as a right site; know round and theta, so that the later checks are reached."""
        ask = pb.GetRunRequest(protocol_version=PROTOCOL_VERSION)
        answer = await call(SERVICE + "GetRun", ask.SerializeToString())
        self._run = pb.GetRunResponse.FromString(answer)
        self._config = config_from_json(self._run.config_json)
        self._caller.run_id = self._run.run_id
        joined = await call(SERVICE + "Join", self._join().SerializeToString())
        self._caller.incarnation = pb.JoinResponse.FromString(joined).incarnation
        beat = pb.HeartbeatRequest(caller=self._caller)
        answer = await call(SERVICE + "Heartbeat", beat.SerializeToString())
        self._round = pb.HeartbeatResponse.FromString(answer).round
        status = pb.StatusRequest(protocol_version=PROTOCOL_VERSION)
        answer = await call(SERVICE + "Status", status.SerializeToString())
        text = pb.StatusResponse.FromString(answer).status_json
        self._theta_digest = text.partition('"theta_digest": "')[2][:64]

    def messages(self, method: str) -> list[bytes]:
        """What to send in one call: for streams up to six messages."""
        if self._random.random() < 0.15:
            return [self._noise() for _ in range(self._random.choice((1, 1, 1, 3)))]
        right = self._right(method.rpartition("/")[2])
        return [self._changed(message) for message in right]

    # --- right requests -------------------------------------------------------------------------

    def _right(self, name: str) -> list[Message]:
        caller, round_ = self._caller, self._round
        version = PROTOCOL_VERSION
        match name:
            case "GetRun":
                return [pb.GetRunRequest(protocol_version=version)]
            case "Join":
                return [self._join()]
            case "Heartbeat":
                return [self._beat()]
            case "Push":
                return self._push()
            case "PushOffset":
                return [pb.PushOffsetRequest(header=self._header(b"x"))]
            case "WaitRound":
                return [
                    pb.WaitRoundRequest(
                        caller=caller,
                        have_round=round_,
                        theta_digest=self._theta_digest,
                        timeout_seconds=WAIT_SECONDS,
                    )
                ]
            case "Pull":
                return [pb.PullRequest(caller=caller, round=max(0, round_ - 1), length=64)]
            case "Snapshot":
                return [pb.SnapshotRequest(caller=caller, round=round_ // 10 * 10, length=4096)]
            case "Leave":
                return [pb.LeaveRequest(caller=caller, reason="bye")]
            case "Status":
                return [pb.StatusRequest(protocol_version=version)]
            case "Control":
                return [pb.ControlRequest(protocol_version=version, verb=pb.CONTROL_VERB_PAUSE)]
            case "Probe":
                down = self._random.randrange(1 << 12)
                probe = pb.ProbeRequest(protocol_version=version, download_bytes=down)
                return [probe, pb.ProbeRequest(data=bytes(100))]
            case "ServerReflectionInfo":
                return [reflection_pb2.ServerReflectionRequest(list_services="")]
            case _:
                return [health_pb2.HealthCheckRequest(service="")]

    def _join(self) -> pb.JoinRequest:
        return pb.JoinRequest(
            protocol_version=PROTOCOL_VERSION,
            run_id=self._run.run_id,
            site=self._site,
            instance=f"{self._random.getrandbits(64):x}",
            num_shards=1,
            config_hash=self._run.config_hash,
            layout_fingerprint=LAYOUT.fingerprint,
            layout=[pb.TensorSpec(name=p.name, shape=p.shape) for p in LAYOUT.parameters],
        )

    def _beat(self) -> pb.HeartbeatRequest:
        beat = pb.HeartbeatRequest(caller=self._caller, round=self._round, inner_steps=3)
        beat.phase_seconds.add(phase=pb.SITE_PHASE_COMPUTE, seconds=1.0)
        beat.spans.add(phase=pb.SITE_PHASE_PUSH, round=self._round, seconds=0.1)
        beat.reports.add(round=self._round, train_bits_per_byte=2.0, ef_norm=1.0)
        beat.evaluations.add(round=self._round, bits_per_byte=2.0)
        return beat

    def _header(self, body: bytes) -> pb.PushHeader:
        return pb.PushHeader(
            caller=self._caller,
            round=self._round,
            num_shards=1,
            size_bytes=len(body),
            digest=bytes_digest(body),
            tokens=100,
            inner_steps=2,
            theta_digest=self._theta_digest,
        )

    def _push(self) -> list[Message]:
        """Often a sound frame around a payload with changed bytes, so that it is decoded."""
        a = vector(LAYOUT, self._random.getrandbits(16))
        body = self._edited(shard_body(a, self._config))
        piece = max(1, len(body) // 4)
        parts: list[Message] = [pb.PushRequest(header=self._header(body))]
        pieces = [body[start : start + piece] for start in range(0, len(body), piece)]
        parts.extend(pb.PushRequest(block=make_block(part)) for part in pieces)
        return parts

    # --- wrong ones -----------------------------------------------------------------------------

    def _changed(self, message: Message) -> bytes:
        choice = self._random.random()
        if choice < 0.3:
            return self._edited(message.SerializeToString())
        if choice < 0.7:
            copy = type(message)()
            copy.CopyFrom(message)
            self._change_field(copy)
            return copy.SerializeToString()
        return message.SerializeToString()

    def _noise(self) -> bytes:
        longest = self._random.choice((0, 8, 64, 512, 50_000))
        return self._random.randbytes(self._random.randint(0, longest))

    def _edited(self, data: bytes) -> bytes:
        """A few bytes flipped, inserted, removed, doubled or cut off; sometimes none."""
        edited = bytearray(data)
        for _ in range(self._random.choice((0, 1, 1, 2, 8))):
            at = self._random.randrange(len(edited) + 1)
            span = self._random.choice((1, 1, 4, 30))
            match self._random.randrange(5):
                case 0 if at < len(edited):
                    edited[at] ^= 1 << self._random.randrange(8)
                case 1:
                    edited[at:at] = self._random.randbytes(span)
                case 2:
                    del edited[at : at + span]
                case 3:
                    edited[at:at] = edited[at : at + span]
                case 4:
                    del edited[at:]
        return bytes(edited)

    def _change_field(self, message: Message) -> None:
        """One field, at any depth, to a value from the edge of its type."""
        field = self._random.choice(message.DESCRIPTOR.fields)
        if field.is_repeated:
            self._change_repeated(message, field)
        elif field.message_type is not None:
            child = getattr(message, field.name)
            if field.message_type.fields:
                self._change_field(child)
            child.SetInParent()
        else:
            setattr(message, field.name, self._value(field))

    def _change_repeated(self, message: Message, field: FieldDescriptor) -> None:
        items: Any = getattr(message, field.name)
        for _ in range(self._random.choice((0, 1, 2, 300))):
            if field.message_type is None:
                items.append(self._value(field))
            else:
                self._change_field(items.add())

    def _value(self, field: FieldDescriptor) -> Any:
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
                return self._random.randbytes(self._random.choice((0, 1, 15, 16, 17, 5000)))
            case FieldDescriptor.CPPTYPE_STRING:
                return self._random.choice((*_TEXTS, *self._others))
            case FieldDescriptor.CPPTYPE_BOOL:
                return self._random.random() < 0.5
            case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
                return self._random.choice(_FLOATS)
            case FieldDescriptor.CPPTYPE_ENUM:
                return self._random.choice((0, 1, 5, 99, -1, 2**31 - 1))
        least, most = _RANGES[field.cpp_type]
        return self._random.choice([n for n in _INTEGERS if least <= n <= most])
