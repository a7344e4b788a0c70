"""What a delay costs in loss, beside what runs differ in that differ in nothing.

    python -m benchmarks.overlap --out build/overlap.jsonl --seed 0 1 2 3 4 5
    python -m benchmarks.overlap --out ... --seed 0 1 2 --delay 5 15 --blind

One JSON line a run. The runs of all seeds and delays train in lockstep as one fleet
(benchmarks/fleet.py), which takes a fourth of the time: a model of 0.12 million parameters (with
`--model demo` 0.82), two sites, 256 tokens a step, H = 15, 60 rounds. `noise` is the control once
more, from an initial theta that differs by a millionth. `--blind`: sites do not anticipate the
update while they wait.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.fleet import Lockstep, train
from benchmarks.methods import METHODS, changed, config_of
from benchmarks.simulation import Simulation
from loco import codec
from loco.config import Config
from loco.errors import ConfigError

NOISE = 1e-6  # relative, on the initial theta


class Blind(Simulation):
    """Sites that wait go on from the end of their own path."""

    def _own_step(self, _round: int) -> float:
        return 0.0


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    codec.warm_up()
    try:
        runs = list(runs_of(arguments))
    except ConfigError as error:
        sys.exit(f"benchmarks.overlap: {error}")
    train(runs)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("a") as file:
        for run in runs:
            line = run.label | {"val_bpb_end": run.simulation.evaluate()}
            file.write(json.dumps(line) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON lines")
    parser.add_argument("--seed", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--delay", nargs="+", type=int, default=[0, 1, 5, 15])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--method", default="ramp", choices=METHODS)
    parser.add_argument("--model", default="small", choices=("small", "demo"))
    parser.add_argument("--blind", action="store_true", help="without anticipation; no controls")
    return parser.parse_args()


def runs_of(arguments: argparse.Namespace) -> Iterator[Lockstep]:
    """One for each seed and delay, and with delay 0 its repetition."""
    kind = Blind if arguments.blind else Simulation
    for seed in arguments.seed:
        for delay in arguments.delay:
            config = config_of_run(arguments, seed, delay)
            label = {name: getattr(arguments, name) for name in ("method", "model", "rounds")}
            label |= {"seed": seed, "delay": delay, "blind": arguments.blind, "noise": False}
            yield Lockstep(kind(config), label)
            if delay == 0:
                yield Lockstep(disturbed(kind(config), seed), label | {"noise": True})


def config_of_run(arguments: argparse.Namespace, seed: int, delay: int) -> Config:
    method, model, rounds = METHODS[arguments.method], arguments.model, arguments.rounds
    base = config_of(method, model=model, sites=2, data="eras", rounds=rounds, seed=seed)
    few_tokens = {"model.seq_len": 64, "data.batch": 4}
    return changed(base, {**few_tokens, "outer.delay_steps": delay})


def disturbed(simulation: Simulation, seed: int) -> Simulation:
    """The same run but for a millionth of the initial theta."""
    noise = np.random.default_rng(seed).standard_normal(simulation.theta.size, np.float32)
    simulation.theta *= 1 + np.float32(NOISE) * noise
    for site in simulation.sites:
        site.write(simulation.theta, simulation.layout)
    return simulation


if __name__ == "__main__":
    main()
