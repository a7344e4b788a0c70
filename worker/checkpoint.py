"""Checkpoints of a site: what it needs to come back as if it had never been away.

    DIR/round-00000012/rank-0/*.safetensors  tensors of a rank, by torch.distributed.checkpoint
    DIR/round-00000012/manifest.json         everything else, and the files' digests; written last

theta and error feedback are stored by rows of the layout and the optimizer by rank, so that a site
may come back with another number of ranks. No random state is stored because there is none: data
order and learning rate are functions of the counters. Nothing is pickled: torch's own format has an
index that is.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

from loco.digest import file_digest
from loco.errors import CheckpointError, ConfigError, LocoError
from loco.layout import CHUNK
from worker.exchange import OuterState
from worker.site import Site
from worker.structure import pack_structure, unpack_structure

log = logging.getLogger("loco.worker")

KEEP = 2
KINDS = ("theta", "error_feedback", "params")
"""Tensors of the outer state, by the names of OuterState."""


class Manifest(BaseModel):
    """Written last: a directory that has it, with these digests, is a whole checkpoint."""

    run_id: str
    site: str
    round: int
    theta_digest: str
    data_cursor: int
    """Inner steps of the site since the run's start."""
    local_steps: int
    """Those of them that no exchange has seen."""
    local_nats: float
    """Their training losses summed, the mean over ranks."""
    starts: list[int]
    """First row of each rank, and the number of rows."""
    optimizers: list[Any]
    """Structure of each rank's optimizer state; its tensors are elsewhere."""
    digests: dict[str, str] = {}
    """XXH3-128 of the files with tensors, hex."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a site stands."""

    round: int
    theta_digest: str
    data_cursor: int
    local_steps: int
    local_nats: float


class Checkpoints:
    """The checkpoints of one site in one directory that all its ranks can reach.

    On failure while saving, the checkpoint before stays the newest; a damaged one is passed over.
    """

    def __init__(self, directory: Path, site: Site, *, run_id: str, name: str) -> None:
        """ConfigError for a directory that cannot be written to: later it would only be logged."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot make the directory of checkpoints {directory}: {error.strerror}; give one "
                "that every rank of the site can write to"
            ) from error
        if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigError(
                f"the directory of checkpoints {directory} cannot be written to; give one that "
                "every rank of the site can"
            )
        self._directory = directory
        self._site = site
        self._run_id = run_id
        self._name = name

    # --- saving ---------------------------------------------------------------------------------

    def save(
        self,
        position: Position,
        state: OuterState,
        optimizer: dict[str, Any],
        rows: range,
        num_rows: int,
    ) -> None:
        """Every rank calls it, at the same position, with its own state and rows.

        Raises:
            CheckpointError: it could not be written, or the optimizer holds what cannot be, on all
                ranks alike; nothing of it is left.
        """
        structure, parts = self._site.together(lambda: pack_structure(optimizer))
        mine = json.dumps([rows.start, structure]).encode()
        ranks = [json.loads(packed) for packed in self._site.gather_bytes(mine)]
        manifest = Manifest(
            run_id=self._run_id,
            site=self._name,
            round=position.round,
            theta_digest=position.theta_digest,
            data_cursor=position.data_cursor,
            local_steps=position.local_steps,
            local_nats=position.local_nats,
            starts=[*(start for start, _ in ranks), num_rows],
            optimizers=[structure for _, structure in ranks],
        )
        aside = self._directory / f"round-{position.round:08d}.partial"
        tensors = {f"{kind}/{rows.start}": getattr(state, kind) for kind in KINDS}
        tensors |= {f"optimizer/{self._site.rank}/{i}": t for i, t in enumerate(parts)}
        try:
            self._site.from_leader(lambda: _make_empty(aside))
            self._site.together(lambda: _save(tensors, aside / _folder(self._site.rank)))
            self._site.from_leader(lambda: self._finish(aside, manifest))
        except CheckpointError:
            if self._site.leads:  # or the room that it takes would be missing the next time, too
                shutil.rmtree(aside, ignore_errors=True)
            raise

    def _finish(self, aside: Path, manifest: Manifest) -> bytes:
        """Give what all ranks have written its name, and remove what is older.

        A leader may sleep in here, and wake up when another one leads: then both remove.
        """
        try:
            self._publish(aside, manifest)
            for old in sorted(self._directory.glob("round-????????"))[:-KEEP]:
                _remove(old)
            for given_up in self._directory.glob("round-????????.partial"):
                if given_up.name < aside.name:  # a rank died while it was written
                    _remove(given_up)
        except OSError as error:
            raise CheckpointError(f"cannot finish the checkpoint {aside}: {error}") from error
        return b""

    def _publish(self, aside: Path, manifest: Manifest) -> None:
        files = [path for path in aside.rglob("*") if path.is_file()]
        manifest.digests = {str(p.relative_to(aside)): file_digest(p).hex() for p in files}
        (aside / "manifest.json").write_text(manifest.model_dump_json(), encoding="utf-8")
        _sync_all(aside)  # so that a power cut cannot leave the name without the bytes
        target = aside.with_suffix("")
        shutil.rmtree(target, ignore_errors=True)
        aside.rename(target)
        _sync(self._directory)

    # --- loading --------------------------------------------------------------------------------

    def newest(self) -> Manifest | None:
        """The newest sound checkpoint of this run and site; the same on all ranks."""
        packed = self._site.from_leader(self._find)
        return Manifest.model_validate_json(packed) if packed else None

    def _find(self) -> bytes:
        for directory in sorted(self._directory.glob("round-????????"), reverse=True):
            manifest = self._sound(directory)
            if manifest is not None:
                return manifest.model_dump_json().encode()
        return b""

    def _sound(self, directory: Path) -> Manifest | None:
        try:
            manifest = Manifest.model_validate_json((directory / "manifest.json").read_bytes())
        except (FileNotFoundError, ValidationError) as error:
            log.error("checkpoint %s is passed over: %s", directory, error)
            return None
        if (manifest.run_id, manifest.site) != (self._run_id, self._name):
            raise LocoError(
                f"checkpoint {directory} is of site {manifest.site!r} in run {manifest.run_id!r}, "
                f"this is site {self._name!r} in run {self._run_id!r}: give another --checkpoint"
            )
        for name, digest in manifest.digests.items():
            if not (directory / name).exists() or file_digest(directory / name).hex() != digest:
                log.error("checkpoint %s is passed over: %s is damaged", directory, name)
                return None
        return manifest

    def load(self, manifest: Manifest, rows: range) -> tuple[OuterState, list[dict[str, Any]]]:
        """The outer state of these rows, and every stored rank's optimizer."""
        tensors: dict[str, Tensor] = {}
        shards = list(zip(manifest.starts, manifest.starts[1:], strict=False))
        directory = self._directory / f"round-{manifest.round:08d}"
        optimizers = []
        for rank, ((start, stop), structure) in enumerate(
            zip(shards, manifest.optimizers, strict=True)
        ):
            optimizer, parts = unpack_structure(structure)
            optimizers.append(optimizer)
            of_rank = {f"optimizer/{rank}/{i}": part for i, part in enumerate(parts)}
            if start < rows.stop and rows.start < stop:
                for kind in KINDS:
                    of_rank[f"{kind}/{start}"] = torch.empty((stop - start) * CHUNK)
            _load(of_rank, directory / _folder(rank))
            tensors |= of_rank
        state = OuterState(**{kind: _cut(tensors, kind, shards, rows) for kind in KINDS})
        return state, optimizers


def _save(tensors: dict[str, Tensor], directory: Path) -> None:
    tensors = _flat({name: t.contiguous() for name, t in tensors.items()})
    # A file a tensor: it makes the bytes of a file in memory.
    files = {name: number for number, name in enumerate(tensors, 1)}
    writer = HuggingFaceStorageWriter(str(directory), files)
    try:
        with warnings.catch_warnings():  # it warns of a world of one, which is what we ask for
            warnings.simplefilter("ignore", UserWarning)
            state_dict_saver.save(tensors, storage_writer=writer, no_dist=True)
    except CheckpointException as wrapped:  # it wraps whatever happens, Ctrl+C too
        error = next(iter(wrapped.failures.values()))[0]
        if isinstance(error, OSError):
            raise CheckpointError(f"cannot write the checkpoint {directory}: {error}") from error
        raise error from wrapped


def _load(tensors: dict[str, Tensor], directory: Path) -> None:
    """Fill the tensors in place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        reader = HuggingFaceStorageReader(str(directory))
        state_dict_loader.load(_flat(tensors), storage_reader=reader, no_dist=True)


def _flat(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same memory in one dimension, without what is empty: the format cannot cut others.

    All are contiguous: of others `view` raises, where a copy would be loaded into and lost.
    """
    return {name: t.view(-1) for name, t in tensors.items() if t.numel()}


def _folder(rank: int) -> str:
    """Every rank writes a folder of its own: no rank waits for another in the middle of it."""
    return f"rank-{rank}"


def _remove(directory: Path) -> None:
    with suppress(FileNotFoundError):  # another removes it, too; the rest goes with the next one
        shutil.rmtree(directory)


def _sync_all(directory: Path) -> None:
    """All files and directories in it, and itself."""
    for path in (*directory.rglob("*"), directory):
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_empty(directory: Path) -> bytes:
    shutil.rmtree(directory, ignore_errors=True)
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"cannot make the checkpoint {directory}: {error}") from error
    return b""


def _cut(
    tensors: dict[str, Tensor], kind: str, shards: list[tuple[int, int]], rows: range
) -> Tensor:
    """The elements of `rows` out of stored shards."""
    parts = [
        tensors[f"{kind}/{start}"][
            max(0, rows.start - start) * CHUNK : (min(stop, rows.stop) - start) * CHUNK
        ]
        for start, stop in shards
        if start < rows.stop and rows.start < stop
    ]
    return torch.cat(parts) if parts else torch.empty(0)
