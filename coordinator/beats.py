"""What a heartbeat may say: numbers that documents, plots and metrics can bear.

A heartbeat is a sign of life whatever else is in it, so nothing is refused: what cannot be true is
left out. One site must not be able to spoil the page that everyone looks at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from loco.wire.v1 import coordinator_pb2 as pb

MOST_ENTRIES = 2000  # of a list; a site keeps 1,000 while nobody answers
LONGEST_TEXT = 64  # a digest
_MOST = 2.0**53  # above it JSON's numbers are not exact


def plain(beat: pb.HeartbeatRequest) -> pb.HeartbeatRequest:
    """The same without what cannot be: a field, or the entry of a list that has such a field."""
    clean = pb.HeartbeatRequest()
    clean.CopyFrom(beat)
    for field in clean.DESCRIPTOR.fields:
        if field.is_repeated:
            entries = getattr(clean, field.name)
            kept = [entry for entry in entries[-MOST_ENTRIES:] if _is_plain(entry)]
            del entries[:]
            entries.extend(kept)
    for field in list(_impossible(clean)):
        clean.ClearField(field.name)  # type: ignore[arg-type] # one of its own
    return clean


def _is_plain(entry: Message) -> bool:
    """Time is spent in a phase: an entry that does not say in which one says nothing."""
    enums = (field.name for field in entry.DESCRIPTOR.fields if field.enum_type is not None)
    return all(getattr(entry, name) for name in enums) and not any(_impossible(entry))


def _impossible(message: Message) -> Iterator[FieldDescriptor]:
    """Fields of the message itself, or whose message has such a field; lists are not looked at."""
    for field, value in message.ListFields():
        if field.is_repeated:
            continue
        if isinstance(value, Message):
            bad = any(_impossible(value))
        elif field.enum_type is not None:
            bad = value not in field.enum_type.values_by_number
        elif isinstance(value, str):
            bad = len(value) > LONGEST_TEXT
        else:
            bad = not (math.isfinite(value) and 0 <= value <= _MOST)
        if bad:
            yield field
