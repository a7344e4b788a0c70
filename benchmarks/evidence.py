"""Measure again, small, what the generated tables show, and rewrite them: `make evidence`.

    python -m benchmarks.evidence                     # everything, the small model (root)
    python -m benchmarks.evidence --only grid demo
    python -m benchmarks.evidence --models small 3m --only grid          # hours on two cores
    python -m benchmarks.evidence --only grid sides --steps 30 --into build/try   # minutes

Every part changes its file under docs/results/ once it is whole: one that fails leaves the numbers
as they were. A run takes the place of the one with the same settings and seed; those that are not
made again here (more seeds, larger models, what was searched once) stay, each with its commit. The
grid is resumable, its lines gather in build/evidence/.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import convergence_plot, downlink_plot, tables
from benchmarks.convergence_search import LONG_STEPS
from benchmarks.convergence_tables import RESULTS, identity
from benchmarks.methods import MODELS
from benchmarks.recorded import DOWNLINK, OVERLAP, SCALING, WAN_AGAIN, demo_record

ROOT = RESULTS.parents[2]
DEMOS = ("loco demo", "loco demo --inner dense", "loco demo --algorithm diloco")
CORES = 2  # runs at a time, each on one thread
STEPS = 900  # inner steps of a run of the grid
GRIDS = (
    "--method ddp localsgd diloco diloco-tuned sparseloco kept kept-5 kept-momentum",
    "--method ddp-muon diloco-muon kept-5-muon",
    "--method ddp diloco-tuned kept-5 kept-5-muon --seed 1",
    "--method torchft-diloco real recipe mean overlap fragments scape one-bit",
    "--method ddp kept-5 --data domains --sites 3",
    "--method ddp kept-5 --data iid",
    "--method ddp kept --sites 4",
    "--method ddp-muon --vary inner.lr 8e-3",
    "--method diloco-tuned --vary inner.steps 30",
    "--method kept-momentum --vary inner.steps 30 --vary inner.lr 4e-3",
    "--method recipe --vary inner.steps 15 --vary codec.k 32 128",
)
"""Arguments of benchmarks.convergence, for each model; the rates are those of the small one."""
LONG = f"--method sparseloco kept-thin --vary inner.steps 10 --steps {LONG_STEPS}"
OVERLAPS = ("--seed 0 1 2 --delay 0 5 15",)
DOWNLINKS = (
    "--seed 0 1 2 --k 16 64 256",
    "--seed 0 1 2 --k 16 64 256 --bits 1",
    "--seed 0 1 2 --k 16 64 256 --exact",
)

Run = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line says."""

    models: list[str]
    steps: int
    into: Path
    """Where result files are; docs/results unless somebody only tries."""

    def file(self, name: str) -> Path:
        return self.into / name


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["small"])
    parser.add_argument("--steps", type=int, default=STEPS, help="of a run of the grid")
    parser.add_argument("--into", type=Path, default=RESULTS.parent, help="result files")
    given = parser.parse_args()
    if given.steps != STEPS and given.into.resolve() == RESULTS.parent:
        parser.error(f"--steps {given.steps} makes other runs than the tables show: add --into DIR")
    asked = Asked(models=given.models, steps=given.steps, into=given.into)
    asked.into.mkdir(parents=True, exist_ok=True)
    for part in given.only:
        started = time.monotonic()
        try:
            PARTS[part](asked)
        except subprocess.CalledProcessError as error:
            said = shlex.join(map(str, error.cmd[1:]))
            sys.exit(f"benchmarks.evidence: {part}: {said} ended with {error.returncode}")
        print(f"{part}: {(time.monotonic() - started) / 60:.0f} minutes", flush=True)
    if asked.into.resolve() != RESULTS.parent:
        return 0
    convergence_plot.main()
    downlink_plot.main()
    return tables.rewrite()


def grid(asked: Asked) -> None:
    """The runs of every model."""
    gathered = ROOT / "build/evidence" / f"convergence-{asked.steps}.jsonl"
    gathered.parent.mkdir(parents=True, exist_ok=True)
    shared = ["--out", str(gathered), "--steps", str(asked.steps)]
    in_pairs(
        ["convergence", *shared, "--model", model, *shlex.split(line)]
        for model in asked.models
        for line in grids(asked.steps)
    )
    merge(asked.file(RESULTS.name), gathered, identity)


def grids(steps: int) -> tuple[str, ...]:
    """Arguments of the grid; long runs come first, and only where the others have their length."""
    return (LONG, *GRIDS) if steps == STEPS else GRIDS


def sides(asked: Asked) -> None:
    """What a delay costs, and the bits of the update: simulated, beside the grid."""
    for name, file, lines, steps in (
        ("overlap", OVERLAP, OVERLAPS, 15), ("downlink", DOWNLINK, DOWNLINKS, 10),
    ):  # fmt: skip
        gathered = ROOT / "build/evidence" / f"{name}-{asked.steps}.jsonl"
        gathered.unlink(missing_ok=True)
        rounds = 60 if asked.steps == STEPS else max(1, asked.steps // steps)
        shared = ["--out", str(gathered), "--rounds", str(rounds)]
        in_pairs([name, *shared, *shlex.split(line)] for line in lines)
        merge(asked.file(file), gathered, settings_of)


def demo(asked: Asked) -> None:
    """Real processes on this machine, one algorithm after another."""
    records = []
    for command in DEMOS:
        words = [sys.executable, "-m", *shlex.split(command), "--json"]
        done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
        records.append(demo_record(command, json.loads(done.stdout)))
    lines = ",\n".join(" " + json.dumps(record) for record in records)
    asked.file("demo_cpu_2026-11-30.json").write_text(f"[\n{lines}\n]\n")


def wan(asked: Asked) -> None:
    """The exchange over an emulated line, ours and torchft's; needs root."""
    report = json.loads(module("wan", "--json"))
    asked.file(WAN_AGAIN).write_text(json.dumps(report, indent=1) + "\n")


def scaling(asked: Asked) -> None:
    """What the coordinator of 124 million parameters and two sites spends."""
    gathered = ROOT / "build/evidence/scaling.jsonl"
    gathered.unlink(missing_ok=True)
    module("scaling_run", "--out", str(gathered), "--sizes", "124", "--sites", "2")
    merge(asked.file(SCALING), gathered, measured)


def in_pairs(commands: Iterable[list[str]]) -> None:
    """Benchmarks with their arguments, as many at a time as there are cores."""
    with ThreadPoolExecutor(CORES) as pool:
        list(pool.map(lambda words: module(*words), commands))


def merge(file: Path, gathered: Path, same: Callable[[Run], str]) -> None:
    """What was gathered, then the lines of the file that it does not repeat; it is used up."""
    new = [json.loads(line) for line in gathered.read_text().splitlines()]
    old = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    made = set(map(same, new))
    kept = [run for run in old if same(run) not in made]
    file.write_text("".join(json.dumps(run) + "\n" for run in [*new, *kept]))
    gathered.unlink()


def settings_of(run: Run) -> str:
    """All of a line of benchmarks.overlap or .downlink but what was found."""
    found = ("val_bpb_end", "bits_up", "bits_down", "cpu_seconds")
    said = {"model": "small"} | {name: run[name] for name in run if name not in found}
    return json.dumps(said, sort_keys=True)


def measured(line: Run) -> str:
    """What a line of benchmarks.scaling_run is about."""
    return json.dumps([line.get(name) for name in ("params", "sites", "tls")])


def module(name: str, *arguments: str) -> str:
    """Run another benchmark; what it printed is passed on and returned."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="", flush=True)
    return done.stdout


PARTS: dict[str, Callable[[Asked], None]] = {
    "grid": grid, "sides": sides, "demo": demo, "wan": wan, "scaling": scaling,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
