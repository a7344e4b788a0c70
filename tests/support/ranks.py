"""Processes of a test that form a group, and end as loco's own ranks do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

from loco.processes import end_with


def spawn_ranks(work: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> None:
    """`work(rank, *arguments)` in so many processes; what fails in one of them is raised here."""
    mp.spawn(_rank, (work, arguments), nprocs=ranks)


def _rank(rank: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    work(rank, *arguments)
    # Objects in reference cycles hold the process group until the interpreter is torn down, and a
    # thread of gloo may then abort the process, though all has gone well.
    end_with(lambda: None)
