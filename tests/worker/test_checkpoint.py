"""Saving a checkpoint: what goes wrong in the middle of it is said as what it is.

Compared with: the exception that was raised. Run alone: pytest tests/worker/test_checkpoint.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from loco.errors import LocoError
from loco.inner.groups import Group
from worker.checkpoint import Checkpoints, Position
from worker.exchange import OuterState
from worker.site import Site

ROWS = range(1)
AT = Position(round=3, theta_digest="00", data_cursor=9, local_steps=0, local_nats=0.0)


def checkpoints(directory: Path) -> Checkpoints:
    site = Site(torch.device("cpu"), Group())
    return Checkpoints(directory, site, run_id="run", name="paris")


def save(directory: Path) -> None:
    rows = torch.ones(4096)
    state = OuterState(theta=rows, error_feedback=rows, params=rows)
    checkpoints(directory).save(AT, state, {"a": rows}, ROWS, num_rows=1)


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
    assert torch.equal(state.params, torch.ones(4096))
    assert torch.equal(optimizers[0]["a"], torch.ones(4096))
