"""Snapshots: theta and the coordinator's other buffers at a round, with the state beside them.

    snapshots/ROUND/{theta,residual,momentum}   raw little-endian fp32
    snapshots/ROUND/manifest.json               digests, state, journal number; written last

The newest two are kept. One whose files do not have their digests is passed over for the one
before, from which the journal and the contributions lead to the same theta.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import BaseModel, TypeAdapter, ValidationError

from coordinator.failpoints import reach
from coordinator.files import write_aside
from coordinator.state import State
from loco.digest import file_digest
from loco.errors import LocoError

Array = npt.NDArray[np.float32]

log = logging.getLogger("loco.coordinator")

KEEP = 2
_STATE = TypeAdapter(State)


class Manifest(BaseModel):
    """Written last: a directory that has it is a whole snapshot."""

    theta_digest: str
    digests: dict[str, str]
    """XXH3-128 of each buffer's file, hex."""
    journal_seq: int
    """Number of the last event that `state` contains."""
    state: str
    """Canonical JSON of the round machine's state."""
    digest: str = ""
    """XXH3-128 of this manifest with an empty digest, hex."""

    def sealed(self) -> Manifest:
        """The same with its own digest."""
        body = self.model_copy(update={"digest": ""}).model_dump_json().encode()
        return self.model_copy(update={"digest": xxhash.xxh3_128_hexdigest(body)})


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One whole snapshot on disk."""

    round: int
    directory: Path
    manifest: Manifest

    @property
    def theta(self) -> Path:
        """File of theta: raw little-endian fp32, padded."""
        return self.directory / "theta"

    @property
    def state(self) -> State:
        return _STATE.validate_json(self.manifest.state)

    def faults(self) -> list[str]:
        """Files that do not have their digest."""
        return [
            f"{self.directory / name} has not the digest that its manifest states"
            for name, digest in self.manifest.digests.items()
            if not _has_digest(self.directory / name, digest)
        ]


class Snapshots:
    """The snapshots of one state directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(exist_ok=True)

    def all(self) -> list[Snapshot]:
        """Whole snapshots, newest first."""
        found = (_open(path) for path in self._directory.iterdir() if path.name.isdigit())
        return sorted((s for s in found if s is not None), key=lambda s: -s.round)

    def damaged_manifests(self) -> list[Path]:
        """Manifests that are not as they were written; their snapshots count as none."""
        found = sorted(self._directory.glob("*/manifest.json"))
        return [path for path in found if _read(path) is None]

    def newest(self) -> Snapshot:
        """The newest whole snapshot; its files are believed."""
        return self.all()[0]

    def newest_sound(self) -> Snapshot:
        """The newest snapshot whose files have their digests."""
        for snapshot in self.all():
            faults = snapshot.faults()
            if not faults:
                return snapshot
            log.error("snapshot of round %d is damaged: %s", snapshot.round, "; ".join(faults))
        raise LocoError(f"no sound snapshot is left in {self._directory}")

    def remove_unsound(self, newest_sound: int) -> bool:
        """Remove what a crash left half-written, and damaged ones: True if there were any of those.

        `newest_sound` is the round of the snapshot that the run was recovered from.
        """
        fell_back = False
        for path in self._directory.iterdir():
            whole = (path / "manifest.json").exists()
            newer = whole and int(path.name) > newest_sound
            if newer or not whole or _read(path / "manifest.json") is None:
                shutil.rmtree(path)
            fell_back = fell_back or newer
        return fell_back

    def save(
        self,
        round_: int,
        buffers: Mapping[str, Array],
        *,
        theta_digest: str,
        state: State,
        journal_seq: int,
    ) -> Snapshot:
        """Write one; older ones than the newest two go. Returns the oldest that is left."""
        directory = self._directory / str(round_)
        digests = {}
        for name, buffer in buffers.items():
            data = np.ascontiguousarray(buffer).view(np.uint8).data
            digests[name] = xxhash.xxh3_128_hexdigest(data)
            with write_aside(directory / name) as file:
                file.write(data)
            reach("snapshot.buffer_written")
        manifest = Manifest(
            theta_digest=theta_digest,
            digests=digests,
            journal_seq=journal_seq,
            state=_STATE.dump_json(state).decode(),
        )
        with write_aside(directory / "manifest.json") as file:
            file.write(manifest.sealed().model_dump_json().encode())
        reach("snapshot.manifest_written")
        for snapshot in self.all()[KEEP:]:
            (snapshot.directory / "manifest.json").unlink()
            shutil.rmtree(snapshot.directory)
        reach("snapshot.old_removed")
        return self.all()[-1]


def _open(directory: Path) -> Snapshot | None:
    path = directory / "manifest.json"
    if not path.exists():
        return None  # a crash interrupted its writing
    manifest = _read(path)
    if manifest is None:
        if path.exists():
            log.error("%s is damaged", path)
        return None
    return Snapshot(round=int(directory.name), directory=directory, manifest=manifest)


def _read(path: Path) -> Manifest | None:
    """None if it is not as it was written, or not there."""
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except (ValidationError, FileNotFoundError):  # an old one may be removed just now
        return None
    return manifest if manifest == manifest.sealed() else None


def _has_digest(path: Path, digest: str) -> bool:
    return path.exists() and file_digest(path).hex() == digest
