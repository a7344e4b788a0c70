"""Saving a checkpoint: what goes wrong in the middle of it is said as what it is.

Compared with: the exception that was raised. Run alone: pytest tests/worker/test_checkpoint.py
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from loco.errors import CheckpointError, ConfigError
from loco.inner.groups import Group
from worker import checkpoint
from worker.checkpoint import KEEP, KINDS, Checkpoints, Position
from worker.exchange import OuterState
from worker.site import Site

ROWS = range(1)
OPTIMIZER = {
    "matrix": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,
    "step": torch.tensor(7, dtype=torch.int64),
    "nothing": torch.empty(0, 3),
}
AT = Position(round=3, theta_digest="00", data_cursor=9, local_steps=0, local_nats=0.0)


def checkpoints(directory: Path, site: Site | None = None) -> Checkpoints:
    site = site or Site(torch.device("cpu"), Group())
    return Checkpoints(directory, site, run_id="run", name="paris")


def save(
    directory: Path,
    round_: int = AT.round,
    site: Site | None = None,
    optimizer: dict[str, Any] = OPTIMIZER,
) -> None:
    here = checkpoints(directory, site)
    rows = torch.ones(4096)
    state = OuterState(theta=rows, error_feedback=2 * rows, params=3 * rows)
    first = site.rank if site else 0
    at = replace(AT, round=round_)
    here.save(at, state, optimizer, range(first, first + 1), num_rows=site.num_ranks if site else 1)


def test_an_optimizer_that_holds_an_object_is_a_checkpoint_that_fails(tmp_path: Path) -> None:
    """The site goes on, as on a full disk; it would end at the first checkpoint otherwise."""
    save(tmp_path, 3)
    with pytest.raises(CheckpointError, match="a state of type PosixPath cannot"):
        save(tmp_path, 4, optimizer={"state": {0: {"log": Path("x")}}})
    assert [path.name for path in tmp_path.iterdir()] == ["round-00000003"]


@contextlib.contextmanager
def no_file_beyond(num_bytes: int) -> Iterator[None]:
    """The system refuses to write more to any file, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("raised", "seen"),
    [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "disk full"), CheckpointError)],
)
def test_an_interrupt_is_an_interrupt_and_a_full_disk_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    raised: BaseException,
    seen: type[BaseException],
) -> None:
    """torch wraps both in an exception of its own, whose text is a traceback."""

    def fsync(_descriptor: int) -> None:
        raise raised

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(seen) as caught:
        save(tmp_path)
    assert "Traceback" not in str(caught.value)
    monkeypatch.undo()
    assert checkpoints(tmp_path).newest() is None


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    save(tmp_path)
    kept = checkpoints(tmp_path)
    manifest = kept.newest()
    assert manifest is not None
    state, optimizers = kept.load(manifest, ROWS)
    for number, kind in enumerate(KINDS, 1):
        assert torch.equal(getattr(state, kind), torch.full((4096,), float(number)))
    for name, tensor in OPTIMIZER.items():
        assert torch.equal(optimizers[0][name], tensor)
        assert optimizers[0][name].dtype == tensor.dtype


def test_its_files_execute_nothing(tmp_path: Path) -> None:
    """Whoever can write to the directory could else be this process. A pickle begins with PROTO."""
    save(tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".safetensors", ".json"}
    assert not any(path.read_bytes().startswith(b"\x80") for path in files)


def test_a_leader_that_slept_and_the_one_after_it_remove_the_same_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchft another rank leads while one is stopped in the middle of a checkpoint."""
    for round_ in range(KEEP):
        save(tmp_path, round_)
    remove = shutil.rmtree

    def remove_after_the_other(directory: Path, **options: bool) -> None:
        remove(directory, ignore_errors=True)
        remove(directory, **options)

    monkeypatch.setattr(checkpoint.shutil, "rmtree", remove_after_the_other)
    save(tmp_path, KEEP)
    names = [f"round-{round_:08d}" for round_ in range(1, KEEP + 1)]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_what_was_given_up_in_the_middle_goes_with_the_next_checkpoint(tmp_path: Path) -> None:
    """A rank died while all wrote round 2: its bytes must not stay for ever."""
    (tmp_path / "round-00000002.partial" / "rank-0").mkdir(parents=True)
    (tmp_path / "round-00000009.partial").mkdir()
    save(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["round-00000003", "round-00000009.partial"]


def test_a_checkpoint_that_another_leader_took_away_is_a_failure_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that under torchft the group learns of it and its members meet; no traceback."""
    monkeypatch.setattr(checkpoint, "_sync_all", shutil.rmtree)
    with pytest.raises(CheckpointError, match=r"cannot finish the checkpoint .*round-00000003"):
        save(tmp_path)


# Nothing; part of a file's header; small files only; all but the outer state's 16 KiB tensors.
@pytest.mark.parametrize("num_bytes", [0, 10, 300, 8192])
def test_what_does_not_fit_leaves_the_checkpoint_before_and_nothing_else(
    tmp_path: Path, num_bytes: int
) -> None:
    save(tmp_path, 3)
    for round_ in (4, 5):
        with no_file_beyond(num_bytes), pytest.raises(CheckpointError, match="File too large"):
            save(tmp_path, round_)
        assert [path.name for path in tmp_path.iterdir()] == ["round-00000003"]
    kept = checkpoints(tmp_path)
    manifest = kept.newest()
    assert manifest is not None
    assert manifest.round == 3
    state, _ = kept.load(manifest, ROWS)
    assert torch.equal(state.theta, torch.ones(4096))
    save(tmp_path, 6)
    newest = checkpoints(tmp_path).newest()
    assert newest is not None
    assert newest.round == 6


def save_where_the_last_rank_has_no_room(rank: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCO_INIT_METHOD=f"file://{folder}/meet")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    site = Site.join("cpu")
    directory = Path(folder, "checkpoint")
    save(directory, 3, site)
    room = no_file_beyond(8192) if rank == 1 else contextlib.nullcontext()
    with room, pytest.raises(CheckpointError, match=r"round-00000004.partial/rank-1: .*too large"):
        save(directory, 4, site)
    assert site.sum(1.0) == [2.0], "no rank waits in another collective"
    newest = checkpoints(directory, site).newest()
    assert newest is not None
    assert newest.round == 3
    site.close()


@pytest.mark.slow
def test_all_ranks_know_that_one_had_no_room(tmp_path: Path) -> None:
    mp.spawn(save_where_the_last_rank_has_no_room, (str(tmp_path),), nprocs=2)
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["round-00000003"]


def test_everything_that_is_written_is_synced_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[Path] = set()
    fsync = os.fsync

    def sync(descriptor: int) -> None:
        synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    save(tmp_path)
    saved, aside = tmp_path / "round-00000003", tmp_path / "round-00000003.partial"
    written = {aside / path.relative_to(saved) for path in saved.rglob("*")}
    assert aside / "rank-0" / "model.safetensors.index.json" in written
    assert written | {aside, tmp_path} <= synced


@pytest.mark.parametrize("what", ["a file", "below a file"])
def test_a_directory_that_cannot_be_one_is_refused_at_the_start(tmp_path: Path, what: str) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=r"cannot make the directory of checkpoints .*give one"):
        checkpoints(file if what == "a file" else file / "below")
