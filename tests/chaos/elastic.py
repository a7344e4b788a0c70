"""A site under torchft in the harness: every rank on a node of its own, and a lighthouse.

As on several nodes: each rank has a `loco worker`, which the harness starts and kills when it
wants, so that it decides who is there. What `loco worker` itself starts again is another test's
(tests/integration/test_ranks_die.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from worker.elastic.lighthouse import command as lighthouse_command

from . import steps
from .processes import ROOT, Coordinator, Process, SiteProcess, free_port, until
from .steps import Step

RANK_TIMEOUT = 2.0
RESUME_SECONDS = RANK_TIMEOUT + 1.0  # from a death to the next step of the others
LIGHTHOUSE_SECONDS = 15.0  # from its start to the next step
JOIN_SECONDS = 180.0  # a rank that starts imports torch while the machine is busy


class ElasticSite(SiteProcess):
    """One site whose ranks come and go; `process` is its lighthouse."""

    def __init__(self, directory: Path, name: str, ranks: int, coordinator: Coordinator) -> None:
        super().__init__(directory, name, ranks, coordinator)
        self._address = f"127.0.0.1:{free_port()}"
        self.nodes = {slot: Process(directory / f"{name}-{slot}.log") for slot in range(ranks)}
        self._folder = directory / f"{name}-steps"
        self._folder.mkdir()
        self.measured: dict[str, list[float]] = {}
        """Seconds, by what was measured."""
        self.late: list[str] = []
        """What took longer than its bound."""

    # --- its processes --------------------------------------------------------------------------

    def start(self, *, ranks: int | None = None) -> None:
        """All ranks together; how many is fixed."""
        assert ranks is None
        self.start_lighthouse()
        for slot in self.nodes:
            self.start_rank(slot)

    def start_lighthouse(self) -> None:
        self.spawn(lighthouse_command(self._address, RANK_TIMEOUT), RUST_LOG="error")

    def kill_lighthouse(self) -> None:
        super().kill()

    def start_rank(self, slot: int) -> None:
        """The node of one rank; with a backup of what one rank has alone, and no restarts."""
        flags = {
            "--fault-tolerance": "torchft",
            "--lighthouse": self._address,
            "--site-ranks": str(self.num_ranks),
            "--first-rank": str(slot),
            "--rank-timeout": str(RANK_TIMEOUT),
            "--max-restarts": "0",
        }
        words = [part for item in flags.items() for part in item]
        paths = [str(Path(__file__).with_name("watched")), str(ROOT)]
        self.nodes[slot].spawn(
            self.command(*words, "--shard-backup", ranks=1),
            PYTHONPATH=os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
            LOCO_STEP_LOG=str(self._folder),
            GLOO_SOCKET_IFNAME="lo",
            RUST_LOG="error",
        )

    def kill_ranks(self, *slots: int) -> float:
        """SIGKILL to those nodes at once; the moment of it."""
        killed = time.monotonic()
        for slot in slots:
            self.nodes[slot].kill()
        return killed

    def rank(self, slot: int) -> psutil.Process:
        """The process that trains."""
        (rank,) = self.nodes[slot].ranks()
        return rank

    def ranks(self) -> list[psutil.Process]:
        return [self.rank(slot) for slot in self.nodes]

    def signal(self, number: int) -> None:
        """To all ranks, not to the lighthouse."""
        for node in self.nodes.values():
            node.signal(number)

    def ended(self) -> int | None:
        """The exit code of the first process that has ended by itself."""
        codes = (node.ended() for node in self.nodes.values())
        return next((code for code in codes if code is not None), super().ended())

    def wait(self, seconds: float = JOIN_SECONDS) -> int:
        """The worst exit code of the ranks."""
        codes = [node.wait(seconds) for node in self.nodes.values()]
        return max(codes, key=abs)

    def kill(self) -> None:
        for node in self.nodes.values():
            node.kill()
        self.kill_lighthouse()

    def lines(self) -> Iterator[dict[str, Any]]:
        for node in self.nodes.values():
            yield from node.lines()

    def tail(self, count: int = 15) -> str:
        return "\n".join(node.tail(count) for node in self.nodes.values())

    # --- what its ranks did ---------------------------------------------------------------------

    def steps(self) -> list[Step]:
        return steps.read(self._folder)

    def leader(self) -> int:
        """The slot that leads now."""
        return self.steps()[-1].members[0]

    def trains(self, *members: int, since: float, what: str) -> float:
        """Wait until each of exactly these members has made a step together; when the first did."""
        seen: dict[int, Step] = {}

        def all_have() -> bool:
            code = self.ended()
            assert code is None, f"a process of {self.name} ended with {code}:\n{self.tail()}"
            for step in self.steps():
                if step.at > since and set(step.members) == set(members):
                    seen.setdefault(step.slot, step)
            return len(seen) == len(members)

        until(all_have, what, JOIN_SECONDS)
        return min(step.at for step in seen.values())

    def goes_on(self, *members: int, since: float, what: str, within: float) -> None:
        """As `trains`, and the time is held against a bound; the run goes on all the same."""
        seconds = self.trains(*members, since=since, what=what) - since
        self.measured.setdefault(what, []).append(seconds)
        if seconds >= within:
            self.late.append(f"{what} took {seconds:.1f} s, allowed are {within:g} s")
