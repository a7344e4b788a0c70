"""The run's chain of digests on disk (loco.chain): STATE/chain.jsonl, one entry a line.

An update's entry is synced before its round is committed, so that no site ever sees an update
without one; what a crash repeats is the same bytes, and has its entry already. With the updates and
snapshots beside it, the file can be published: the authority's certificate is all it takes to check
it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding

from coordinator.files import append_synced
from coordinator.keys import Keys
from loco.chain import FIRST, Entry, Fact, sign
from loco.errors import LocoError

log = logging.getLogger("loco.coordinator")

FILE = "chain.jsonl"
_READ_BYTES = 1 << 20


class Chain:
    """Appends; safe to call from any thread, one call at a time.

    In memory it holds the last `remembered` entries, as many as anyone may ask for.
    """

    def __init__(self, directory: Path, run_id: str, keys: Keys | None, remembered: int) -> None:
        self._path = directory / FILE
        self._run_id = run_id
        self._keys = keys
        self._remembered = remembered
        self._last = FIRST
        self._entries: OrderedDict[tuple[str, int], Entry] = OrderedDict()
        _cut_torn_line(self._path)
        for entry in read(self._path):
            self._remember(entry)

    def add(self, kind: str, round_: int, file: Path, theta_digest: str) -> None:
        """Append an entry for a file; one that is there already is left. LocoError if it differs:
        the run has made other bytes than before."""
        fact = Fact(
            run_id=self._run_id,
            kind=kind,
            round=round_,
            sha256=sha256_of(file),
            size_bytes=file.stat().st_size,
            theta_digest=theta_digest,
        )
        have = self._entries.get((kind, round_))
        if have is not None:
            if have.fact != fact:
                raise LocoError(
                    f"{kind} {round_} is not what {self._path} states: a file of the state "
                    "directory has changed"
                )
            return
        entry = self._signed(Entry(body=fact.to_json(), previous=self._last))
        append_synced(self._path, _to_line(entry))
        self._remember(entry)

    def get(self, kind: str, round_: int) -> Entry | None:
        """The entry, signed if the coordinator can; None if it is not remembered."""
        entry = self._entries.get((kind, round_))
        if entry is None or entry.signature:
            return entry
        return self._signed(entry)  # from before the coordinator had a bundle

    def _signed(self, entry: Entry) -> Entry:
        if self._keys is None:
            return entry
        bundle = self._keys.bundle
        return sign(entry, bundle.key, bundle.certificate.public_bytes(Encoding.DER))

    def _remember(self, entry: Entry) -> None:
        fact = entry.fact
        self._entries[fact.kind, fact.round] = entry
        self._last = entry.hash
        while len(self._entries) > self._remembered:
            self._entries.popitem(last=False)


def read(path: Path) -> Iterator[Entry]:
    """All entries, oldest first; LocoError names a line that is none."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                fields = json.loads(line)
                yield Entry(
                    body=fields["body"],
                    previous=bytes.fromhex(fields["previous"]),
                    signature=base64.b64decode(fields["signature"]),
                    certificate=base64.b64decode(fields["certificate"]),
                )
            except (ValueError, KeyError, TypeError) as error:
                raise LocoError(f"line {number} of {path} is not an entry: {error}") from error


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_line(entry: Entry) -> bytes:
    fields = {
        "body": entry.body,
        "previous": entry.previous.hex(),
        "signature": base64.b64encode(entry.signature).decode(),
        "certificate": base64.b64encode(entry.certificate).decode(),
    }
    return json.dumps(fields).encode() + b"\n"


def _cut_torn_line(path: Path) -> None:
    """A crash may have torn the last line; its entry was of nothing that anyone has seen."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - _READ_BYTES))
        tail = file.read()
        if tail and not tail.endswith(b"\n"):
            file.truncate(end - len(tail) + tail.rfind(b"\n") + 1)
            log.warning("the last line of %s was torn by a crash: it is written again", path)
