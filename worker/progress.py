"""Where a site stands in the run, beside parameters, optimizer and outer state."""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from google.protobuf.message import Message

from loco.wire.v1 import coordinator_pb2 as pb
from worker.trainee import Local


@dataclass(frozen=True)
class Contribution:
    """What the site sends for a round."""

    header: pb.PushHeader
    """Without a shard."""
    local: Local
    shards: dict[int, bytes]
    """Those that this rank can upload; empty until they are encoded."""

    @property
    def round(self) -> int:
        return self.header.round

    def header_of(self, shard: int) -> pb.PushHeader:
        """What goes before the bytes of a shard."""
        header = pb.PushHeader()
        header.CopyFrom(self.header)
        header.shard = shard
        return header


@dataclass
class Progress:
    """Equal on all ranks between two changes of their state."""

    plan: pb.RoundPlan = field(default_factory=pb.RoundPlan)
    """Of the round that the site trains for, or trained for last."""
    theta_digest: str = ""
    pending: Contribution | None = None
    """The last contribution of this life of the site."""
    goal: tuple[int, int] = (-1, 0)
    """A round, and how many steps since the last exchange its contribution is measured after."""
    retracted_round: int = -1
    """A round to which the coordinator refused the contribution for its content."""
    in_flight: bool = False
    """A contribution was captured, and the update that answers it is not applied yet."""
    repeats: bool = False
    """All state is that of an earlier life of this site, which may have gone on from here: until a
    snapshot replaces it, or this life is told to train for a round."""
    heartbeat_seconds: float = 0.0
    waited_before: float = 0.0
    """Seconds that this rank had waited when the contribution in flight was encoded."""

    def facts(self) -> dict[str, Any]:
        """What ranks at one place have in common at any time, as JSON."""
        pending = self.pending
        return {
            "theta_digest": self.theta_digest,
            "pending": pending and [pack(pending.header), asdict(pending.local)],
        }

    def notes(self) -> dict[str, Any]:
        """The rest, which one rank may know a moment before another, as JSON."""
        return {
            "plan": pack(self.plan),
            "goal": self.goal,
            "retracted_round": self.retracted_round,
            "in_flight": self.in_flight,
            "repeats": self.repeats,
            "heartbeat_seconds": self.heartbeat_seconds,
        }

    def take(self, facts: dict[str, Any], notes: dict[str, Any], shards: dict[int, bytes]) -> None:
        """Stand where another rank stands that gave `facts` and `notes`."""
        self.theta_digest = facts["theta_digest"]
        self.pending = None
        if facts["pending"] is not None:
            header, local = facts["pending"]
            self.pending = Contribution(unpack(pb.PushHeader, header), Local(**local), shards)
        self.plan = unpack(pb.RoundPlan, notes["plan"])
        round_, steps = notes["goal"]
        self.goal = (round_, steps)
        self.retracted_round = notes["retracted_round"]
        self.in_flight, self.repeats = notes["in_flight"], notes["repeats"]
        self.heartbeat_seconds = notes["heartbeat_seconds"]


def pack(message: Message) -> str:
    """A message as text for JSON."""
    return b64encode(message.SerializeToString(deterministic=True)).decode()


MessageT = TypeVar("MessageT", bound=Message)


def unpack(kind: type[MessageT], text: str) -> MessageT:
    """The inverse of `pack`."""
    return kind.FromString(b64decode(text))
