"""Measure again what the generated tables show, and rewrite them: `make evidence`.

    python -m benchmarks.evidence              # the small model's grid, the demo, the WAN (root)
    python -m benchmarks.evidence --only grid demo
    python -m benchmarks.evidence --models small demo 3m --only grid     # hours on two cores

Every part replaces its file under docs/results/ once it is whole: one that fails leaves the numbers
as they were. The grid is resumable, its lines gather in build/evidence/. Lines of models that were
not asked for stay.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from benchmarks import convergence_plot, tables
from benchmarks.convergence_tables import RESULTS, load
from benchmarks.methods import MODELS
from benchmarks.recorded import demo_record

ROOT = RESULTS.parents[2]
GATHERED = ROOT / "build/evidence"
DEMOS = ("loco demo", "loco demo --inner dense", "loco demo --algorithm diloco")
CORES = 2  # runs at a time, each on one thread
GRIDS = (
    "--steps 900 --method ddp localsgd diloco sparseloco recipe kept kept-5 --seed 0 1 2",
    "--steps 900 --method torchft-diloco real mean overlap fragments scape one-bit",
    "--steps 900 --method ddp localsgd sparseloco recipe --vary inner.lr 2e-3 8e-3",
    "--steps 900 --method diloco --vary inner.lr 1e-3 4e-3",
    "--steps 900 --method kept-5 --vary inner.lr 4e-3 1.6e-2",
    "--steps 900 --method ddp localsgd diloco kept kept-5 --data iid",
    "--steps 900 --method localsgd diloco kept --sites 4",
    "--steps 900 --method recipe --sites 4 --vary codec.k_sites 1 4",
    "--steps 900 --method localsgd --vary inner.steps 5 --vary inner.lr 4e-3 8e-3",
    "--steps 900 --method diloco --vary inner.steps 10 30 60",
    "--steps 900 --method recipe --vary inner.steps 10 15 30 60 --vary codec.k 32 64 128",
    "--steps 900 --method kept --vary inner.steps 10 30 60 --vary codec.k 512 1024",
    "--steps 900 --method kept --vary inner.steps 5 15 --vary codec.k 128 256",
)
"""Arguments of benchmarks.convergence, for each model; the rates are those of the small one."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["small"])
    arguments = parser.parse_args()
    GATHERED.mkdir(parents=True, exist_ok=True)
    for part in arguments.only:
        PARTS[part](arguments.models)
    return tables.rewrite()


def grid(models: list[str]) -> None:
    """The runs of every model, and the plots."""
    out = GATHERED / "convergence.jsonl"
    lines = [["--model", model, *shlex.split(line)] for model in models for line in GRIDS]
    with ThreadPoolExecutor(CORES) as pool:
        list(pool.map(lambda line: module("convergence", "--out", str(out), *line), lines))
    old = [run for run in load() if run["model"] not in models]
    RESULTS.write_text("".join(json.dumps(run) + "\n" for run in [*load(out), *old]))
    out.unlink()
    convergence_plot.main()


def demo(_models: list[str]) -> None:
    """Real processes on this machine, one algorithm after another."""
    records = []
    for command in DEMOS:
        words = [sys.executable, "-m", *shlex.split(command), "--json"]
        done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
        records.append(demo_record(command, json.loads(done.stdout)))
    lines = ",\n".join(" " + json.dumps(record) for record in records)
    (RESULTS.parent / "demo_cpu_2026-11-30.json").write_text(f"[\n{lines}\n]\n")


def wan(_models: list[str]) -> None:
    """The exchange over an emulated line, ours and torchft's; needs root."""
    report = json.loads(module("wan", "--json"))
    text = json.dumps(report, indent=1) + "\n"
    (RESULTS.parent / "wan_834k_2026-11-30.json").write_text(text)


def module(name: str, *arguments: str) -> str:
    """Run another benchmark; what it printed is passed on and returned."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="", flush=True)
    return done.stdout


PARTS: dict[str, Callable[[list[str]], None]] = {"grid": grid, "demo": demo, "wan": wan}

if __name__ == "__main__":
    sys.exit(main())
