"""A site whose ranks come and go, as real processes around real training, without a coordinator.

    python -m support.members FOLDER SLOT LIFE     one rank: FOLDER/site.json says of what

Each rank appends a line to FOLDER/rank-SLOT.jsonl for every step that it committed, with the hash
of its parameters; `Members` starts, kills and stops them, and reads the lines. A rank comes to the
others when FOLDER/LIFE is there, so that a test need not wait for imports at the wrong moment.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from chaos.steps import Step, disagreements, phases, read, tell
from prometheus_client import CollectorRegistry
from support.cluster import free_port
from support.live import eventually

from loco.config import Config
from loco.log import start_logging
from loco.metrics import Catalogue, WireMetrics
from loco.model import layout_of, pack
from loco.wire.access import Access
from loco.wire.v1 import coordinator_pb2 as pb
from worker.elastic.host import Rules
from worker.elastic.lighthouse import JOIN_TIMEOUT_SECONDS
from worker.elastic.lighthouse import command as lighthouse_command
from worker.elastic.outer import ReplicatedExchange
from worker.elastic.replica import WorkerReplica
from worker.elastic.site import ElasticSite
from worker.meanwhile import Meanwhile
from worker.progress import Progress
from worker.pulse import Pulse
from worker.session import Session
from worker.site import MembersChanged
from worker.trainer import Trainer

RANK_TIMEOUT = 2.0
FIRST_STEP_SECONDS = 100.0  # for processes that import torch while the machine is busy


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the ranks train."""

    config: dict[str, Any]
    corpus: str
    steps: int
    lighthouse: str
    ranks: int
    shard_backup: bool = False
    heal_seconds: float = 60.0
    step_seconds: float = 0.0
    """Slept in each step, so that a test has time to act in the middle of a run."""
    wait_at: int | None = None
    """After so many steps all wait until FOLDER/over is there."""
    waits_for: Literal["network", "step"] = "network"
    """As for a coordinator that is away, or in a step that takes long and asks nobody."""
    join_timeout_seconds: float = JOIN_TIMEOUT_SECONDS
    """Of the lighthouse."""


# --- one rank -----------------------------------------------------------------------------------


def main(folder: Path, slot: int, gate: Path) -> None:
    """Train until all steps are done."""
    torch.set_num_threads(1)
    start_logging(f"rank {slot}")
    plan = Plan(**json.loads((folder / "site.json").read_text()))
    config = Config.model_validate(plan.config)
    site = ElasticSite(
        torch.device("cpu"),
        plan.lighthouse,
        slot=slot,
        rules=Rules(target_size=plan.ranks, start_seconds=5.0, heal_seconds=plan.heal_seconds),
        interface="127.0.0.1",
        rank_timeout_seconds=RANK_TIMEOUT,
        patience_seconds=60.0,
        shard_backup=plan.shard_backup,
    )
    trainer = Trainer(config, site, "paris", plan.corpus)
    layout = layout_of(trainer.model)
    exchange = ReplicatedExchange(config, site, trainer.model, layout)
    exchange.load(pack(trainer.model, layout).tobytes(), 0)
    wire = WireMetrics(Catalogue(CollectorRegistry()))
    session = Session("127.0.0.1:1", "paris", 1.0, wire, Access())
    (folder / f"{gate.name}.prepared").touch()
    until(gate)
    pulse = Pulse()
    replica = WorkerReplica(trainer, exchange, Progress(), session, pulse)
    meanwhile = Meanwhile(site, session, pulse, lambda _away: False)

    def wait() -> None:
        if plan.waits_for == "network":
            meanwhile.do(lambda: until(folder / "over"), lets_in=True)
        else:
            until(folder / "over")

    with (folder / f"rank-{slot}.jsonl").open("a") as lines:
        _train(plan, site, trainer, replica, wait, lines)
    torch.save(trainer.model.state_dict(), folder / f"parameters-{slot}")
    site.close()


def until(file: Path) -> None:
    """Wait until a test has made a file."""
    while not file.exists():
        time.sleep(0.01)


def _train(
    plan: Plan,
    site: ElasticSite,
    trainer: Trainer,
    replica: Any,
    wait: Callable[[], None],
    lines: Any,
) -> None:
    rounds = pb.RoundPlan(first_step=0, total_steps=plan.steps)
    site.meet(replica)
    told = trainer.data_cursor
    while trainer.data_cursor < plan.steps:
        try:
            if not site.has_state:
                site.transition(lambda: None)
            if trainer.data_cursor == plan.wait_at:
                wait()
            time.sleep(plan.step_seconds)
            trainer.train(1, rounds)
        except MembersChanged:
            site.meet(replica)
        if trainer.data_cursor == told:
            continue
        told = trainer.data_cursor
        tell(lines, told, site, trainer.model)


# --- all of them, for a test --------------------------------------------------------------------


class Members:
    """The ranks and the lighthouse of one site, in a folder of the test."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder = folder
        self.plan = plan
        self.ranks: dict[int, subprocess.Popen[bytes]] = {}
        self._lives: dict[int, list[subprocess.Popen[bytes]]] = {}
        self._waiting: dict[int, list[tuple[subprocess.Popen[bytes], Path]]] = {}
        self.lighthouse: subprocess.Popen[bytes] | None = None
        (folder / "site.json").write_text(json.dumps(asdict(plan)))

    def __enter__(self) -> Members:
        self.start_lighthouse()
        return self

    def __exit__(self, *_: object) -> None:
        lives = [process for lives in self._lives.values() for process in lives]
        for process in [*lives, self.lighthouse]:
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()

    def start_lighthouse(self) -> None:
        plan = self.plan
        self.lighthouse = self._spawn(
            "lighthouse",
            lighthouse_command(plan.lighthouse, RANK_TIMEOUT, plan.join_timeout_seconds),
        )

    def kill_lighthouse(self) -> None:
        assert self.lighthouse is not None
        self.lighthouse.kill()
        self.lighthouse.wait()

    def prepare(self, *slots: int) -> None:
        """Start processes that wait to be let in; a slot given twice gets two lives in turn.

        Blocks until they are ready.
        """
        gates = []
        for slot in slots:
            lives = self._lives.setdefault(slot, [])
            gates.append(self.folder / f"life-{slot}-{len(lives)}")
            module = [sys.executable, "-m", "support.members"]
            command = [*module, str(self.folder), str(slot), str(gates[-1])]
            lives.append(self._spawn(f"rank-{slot}", command))
            self._waiting.setdefault(slot, []).append((lives[-1], gates[-1]))
        for gate in gates:
            prepared = gate.with_name(f"{gate.name}.prepared")
            eventually(prepared.exists, f"{prepared}\n{self.log}", FIRST_STEP_SECONDS)

    def let_in(self, *slots: int) -> float:
        """Those that were prepared first come to the others; the moment of it."""
        for slot in slots:
            self.ranks[slot], gate = self._waiting[slot].pop(0)
            gate.touch()
        return time.monotonic()

    def start(self, *slots: int) -> None:
        self.prepare(*slots)
        self.let_in(*slots)

    def _spawn(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "PYTHONPATH": paths,
                    "RUST_LOG": "error",
                    "GLOO_SOCKET_IFNAME": "lo",
                    "OMP_NUM_THREADS": "1",
                },
            )

    def kill(self, *slots: int) -> float:
        """SIGKILL to all of them at once; the moment of it."""
        for slot in slots:
            self.ranks[slot].kill()
        killed = time.monotonic()
        for slot in slots:
            self.ranks[slot].wait()
        return killed

    def signal(self, slot: int, number: signal.Signals) -> None:
        self.ranks[slot].send_signal(number)

    def end_wait(self) -> None:
        """What all wait for after `wait_at` steps is over."""
        (self.folder / "over").touch()

    def says(self, text: str, seconds: float = FIRST_STEP_SECONDS) -> None:
        """Wait until a rank has logged what this regular expression finds."""
        try:
            eventually(lambda: re.search(text, self.log), f"a rank says {text!r}", seconds)
        except AssertionError as late:
            raise AssertionError(f"{late}\n{self.log}") from None

    # --- what they did --------------------------------------------------------------------------

    def parameters(self, slot: int) -> dict[str, torch.Tensor]:
        """What a rank had at the end."""
        state: dict[str, torch.Tensor] = torch.load(self.folder / f"parameters-{slot}")
        return state

    def all_steps(self) -> list[Step]:
        return read(self.folder)

    def reach(self, cursor: int, *members: int, seconds: float = FIRST_STEP_SECONDS) -> Step:
        """Wait for a step at or past `cursor`, by exactly these members where they are given."""

        def found() -> Step | None:
            for process in self.ranks.values():
                code = process.poll()
                assert code in (None, 0, -signal.SIGKILL), f"a rank ended with {code}\n{self.log}"
            for step in self.all_steps():
                if step.cursor >= cursor and (not members or set(step.members) == set(members)):
                    return step
            return None

        step = eventually(found, f"step {cursor} by {members or 'anyone'}\n", seconds)
        assert isinstance(step, Step)
        return step

    def finish(self, seconds: float = FIRST_STEP_SECONDS) -> None:
        """Wait until every living rank has made all steps."""
        for slot, process in self.ranks.items():
            if process.poll() != -signal.SIGKILL:
                assert process.wait(seconds) == 0, f"rank {slot}\n{self.log}"

    @property
    def log(self) -> str:
        return "\n".join(p.read_text(errors="replace") for p in sorted(self.folder.glob("*.log")))

    def check(self, until: int) -> dict[int, Step]:
        """Nothing is lost or made twice, and all ranks agree; the last word for each step.

        A step that one rank committed is what all that go on committed, in every bit.
        """
        steps = self.all_steps()
        assert not (found := disagreements(steps)), f"{found}\n{self.log}"
        by_cursor = {step.cursor: step for step in steps}
        assert max(by_cursor) == until
        return by_cursor

    def phases(self) -> list[tuple[list[int], int]]:
        """The memberships in force, and how many steps each committed."""
        return phases(self.all_steps())


def plan_of(folder: Path, config: Config, *, corpus: Path, steps: int, **options: Any) -> Plan:
    """A plan with a lighthouse of its own; nobody else may use its port meanwhile."""
    folder.mkdir(exist_ok=True)
    return Plan(
        config=config.model_dump(mode="json"),
        corpus=str(corpus),
        steps=steps,
        lighthouse=f"127.0.0.1:{free_port()}",
        **options,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
