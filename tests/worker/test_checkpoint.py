"""Saving a checkpoint: what goes wrong in the middle of it is said as what it is.

Compared with: the exception that was raised. Run alone: pytest tests/worker/test_checkpoint.py
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loco.errors import LocoError
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


def checkpoints(directory: Path) -> Checkpoints:
    site = Site(torch.device("cpu"), Group())
    return Checkpoints(directory, site, run_id="run", name="paris")


def save(directory: Path, round_: int = AT.round) -> None:
    rows = torch.ones(4096)
    state = OuterState(theta=rows, error_feedback=2 * rows, params=3 * rows)
    at = replace(AT, round=round_)
    checkpoints(directory).save(at, state, OPTIMIZER, ROWS, num_rows=1)


@pytest.mark.parametrize(
    ("raised", "seen"),
    [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "disk full"), LocoError)],
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
    with pytest.raises(LocoError, match=r"cannot finish the checkpoint .*round-00000003"):
        save(tmp_path)
