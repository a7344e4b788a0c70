"""The inner steps that ranks committed, with the hash of all parameters after each."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO


@dataclass(frozen=True, kw_only=True)
class Step:
    """A committed step of one rank."""

    cursor: int
    """Steps committed before and with it."""
    slot: int
    """Of the rank that tells it."""
    members: list[int]
    """Slots, in order of rank."""
    hash: str
    """Of all parameters."""
    at: float
    """time.monotonic, which all processes of a machine share."""
    lost: float
    """Fraction of the shards lost when members last changed."""


def tell(lines: TextIO, cursor: int, site: Any, model: Any) -> None:
    """Write down a step that `site` has just committed."""
    from worker.elastic.wire import digest_of

    step = Step(
        cursor=cursor,
        slot=site.me.slot,
        members=[member.slot for member in site.members],
        hash=digest_of(list(model.parameters())),
        at=time.monotonic(),
        lost=site.membership().lost_fraction,
    )
    lines.write(json.dumps(asdict(step)) + "\n")
    lines.flush()


def watch(folder: str) -> None:
    """Tell every step that this process commits, in a file of its rank."""
    from worker.trainer import Trainer

    count = Trainer._count
    path = Path(folder, f"rank-{os.environ['RANK']}.jsonl")
    lines = path.open("a")

    def counted(trainer: Any, *arguments: Any) -> None:
        count(trainer, *arguments)
        tell(lines, trainer.data_cursor, trainer._site, trainer.model)

    Trainer._count = counted  # type: ignore[method-assign]


def read(folder: Path) -> list[Step]:
    """All steps of all ranks, in order of time; a line torn by a kill is left out."""
    found = []
    for path in folder.glob("rank-*.jsonl"):
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                found.append(Step(**json.loads(line)))
    return sorted(found, key=lambda step: step.at)


def disagreements(steps: Iterable[Step]) -> list[str]:
    """Where ranks committed a step with other parameters, or the site left one out.

    A step that one rank committed is what all that go on committed, in every bit.
    """
    first: dict[int, Step] = {}
    found = []
    for step in steps:
        known = first.setdefault(step.cursor, step)
        if known.hash != step.hash:
            found.append(f"parameters differ at step {step.cursor}: {known} and {step}")
    missing = sorted(set(range(1, max(first, default=0) + 1)) - first.keys())
    return found + [f"step {cursor} was left out" for cursor in missing]


def phases(steps: Iterable[Step]) -> list[tuple[list[int], int]]:
    """The memberships in force, and how many steps each committed."""
    members = {step.cursor: step.members for step in steps}
    found: list[tuple[list[int], int]] = []
    for cursor in sorted(members):
        if not found or found[-1][0] != members[cursor]:
            found.append((members[cursor], 0))
        found[-1] = (found[-1][0], found[-1][1] + 1)
    return found
