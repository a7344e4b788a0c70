"""What a rank that joins costs those who train: how long they stand still, in seconds and steps.

    python -m benchmarks.torchft_heal --json        2 ranks train, a third joins; a minute

They meet twice: when it comes (it is sent to fetch what lasts, beside their training), and when it
has that (it takes the rest). Reported are the times of rank 0 in these meetings; their sum over the
median step of two ranks is what the healing delays.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.torchft_cost import (
    RANKS,
    Elastic,
    build_elastic,
    config_of,
    for_each_sync,
    run_ranks,
)
from loco.wire.v1 import coordinator_pb2 as pb
from worker.site import MembersChanged

FIRST_STEPS, LAST_STEPS = 20, 10  # by two ranks before the third comes, by three after
PLAN = pb.RoundPlan(first_step=0, total_steps=100_000)


class Course:
    """The steps of one rank, and the meetings between them."""

    def __init__(self, rank: Elastic) -> None:
        self._rank = rank
        self.steps: list[tuple[int, float]] = []  # members, seconds
        self.meetings: list[float] = []
        self._meet()

    def _meet(self) -> None:
        started = time.perf_counter()
        self._rank.site.meet(self._rank.replica)
        if not self._rank.site.has_state:
            self._rank.site.transition(lambda: None)
        self.meetings.append(time.perf_counter() - started)

    def step(self) -> None:
        """One step, or a meeting in its place."""
        started = time.perf_counter()
        try:
            self._rank.trainer.train(1, PLAN)
        except MembersChanged:
            self._meet()
        else:
            self.steps.append((self._rank.site.num_ranks, time.perf_counter() - started))

    def count(self, members: int) -> int:
        return sum(of == members for of, _ in self.steps)


def rank_main(rank: int, folder: str, arguments: argparse.Namespace, sync: str, _pid: int) -> None:
    """Two train; the last comes when they have made some steps; rank 0 says when all end."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    config, corpus = config_of(arguments.size, sync), f"{folder}/text.txt"
    built = build_elastic(config, corpus, rank, arguments.lighthouse, start_seconds=2.0)
    ready, go, end = Path(folder, "ready"), Path(folder, "go"), Path(folder, "end")
    if rank == RANKS - 1:
        ready.touch()
        _wait_for(go)
    else:
        _wait_for(ready)
    course = Course(built)
    while not end.exists() or built.trainer.data_cursor < int(end.read_text()):
        course.step()
        if rank == 0 and course.count(RANKS - 1) == FIRST_STEPS:
            go.touch()
        if rank == 0 and course.count(RANKS) == LAST_STEPS and not end.exists():
            aside = end.with_suffix(".new")
            aside.write_text(str(built.trainer.data_cursor + 2))
            aside.rename(end)
    if rank == 0:
        found = {
            "parameters": sum(p.numel() for p in built.trainer.model.parameters()),
            "step_seconds": statistics.median(s for of, s in course.steps if of < RANKS),
            "steps_meanwhile": course.count(RANKS - 1) - FIRST_STEPS,
            "meetings": course.meetings[1:],
            "healed_bytes": built.site.membership().healed_bytes,
            "lasting_bytes": sum(t.nbytes for t in built.replica.give_beside()[1].values()),
        }
        Path(folder, "times.json").write_text(json.dumps(found))
    built.site.close()


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def measure(arguments: argparse.Namespace, sync: str) -> dict[str, Any]:
    """One joiner."""
    found = run_ranks(rank_main, arguments, sync)
    stood = sum(found["meetings"])
    return {
        "sync": sync,
        "parameters": found["parameters"],
        "step_ms": round(1e3 * found["step_seconds"], 1),
        "meetings_ms": [round(1e3 * seconds, 1) for seconds in found["meetings"]],
        "steps_meanwhile": found["steps_meanwhile"],
        "beside_megabytes": round(found["lasting_bytes"] / 1e6, 1),
        "standing_megabytes": round((found["healed_bytes"] - found["lasting_bytes"]) / 1e6, 1),
        "steps_delayed": round(stood / found["step_seconds"], 2),
        "load_average": os.getloadavg()[0],
    }


def said(found: dict[str, Any]) -> str:
    """The same for people."""
    return (
        f"{found['beside_megabytes']} MB beside training, {found['standing_megabytes']} MB while "
        f"all stood, meetings {found['meetings_ms']} ms of steps of {found['step_ms']} ms: "
        f"{found['steps_delayed']} steps delayed"
    )


def main() -> None:
    for_each_sync(argparse.ArgumentParser(description=__doc__.partition("\n")[0]), measure, said)


if __name__ == "__main__":
    main()
