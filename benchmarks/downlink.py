"""What the downlink costs in bits and loss: simulated runs, one JSON line each.

    python -m benchmarks.downlink --out build/downlink.jsonl --k 16 32 64 128 --seed 0 1 2
    python -m benchmarks.downlink --out build/downlink.jsonl --k 16 32 64 128 --seed 0 1 2 --bits 1
    python -m benchmarks.downlink --out build/downlink.jsonl --k 16 32 64 128 --seed 0 1 2 --exact

Sites are eras of the speeches, each with a sequence of 64 bytes an inner step; the runs of all k
and seeds train in lockstep as one fleet (benchmarks/fleet.py), so that they fit on one core. Bits
are those of payloads, headers included, over parameters. `--exact` is the control: the update in
fp32. With more than `--k-sites` sites each sends k * k_sites / sites values of a chunk.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.fleet import Lockstep, train
from benchmarks.methods import METHODS, MODELS, changed, config_of
from benchmarks.simulation import Simulation
from loco import codec
from loco.config import Config
from loco.data.eras import eras
from loco.errors import ConfigError

LABEL = ("model", "method", "sites", "rounds", "steps", "k_sites", "bits", "alpha", "exact")


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    codec.warm_up()
    started = time.process_time()
    try:
        runs = list(runs_of(arguments))
    except ConfigError as error:
        sys.exit(f"benchmarks.downlink: {error}")
    train(runs)
    each = round((time.process_time() - started) / len(runs), 1)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("a") as file:
        for run in runs:
            line = json.dumps(run.label | measured(run) | {"cpu_seconds": each})
            file.write(line + "\n")
            print(line)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; runs are appended")
    parser.add_argument("--model", default="small", choices=MODELS)
    parser.add_argument("--method", default="sparseloco", choices=METHODS)
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=10, help="H")
    parser.add_argument("--seed", nargs="+", type=int, default=[0])
    parser.add_argument("--k", nargs="+", type=int, default=[64])
    parser.add_argument("--k-sites", type=int, default=3)
    parser.add_argument("--bits", type=int, default=2, help="of a value, up and down")
    parser.add_argument("--alpha", type=float, default=1.0)
    parser.add_argument("--exact", action="store_true", help="the update in fp32")
    return parser.parse_args()


def runs_of(arguments: argparse.Namespace) -> Iterator[Lockstep]:
    """One for each seed and k."""
    for seed, k in itertools.product(arguments.seed, arguments.k):
        label = {name: getattr(arguments, name) for name in LABEL} | {"seed": seed, "k": k}
        config = config_of_run(arguments, seed, k)
        yield Lockstep(Simulation(config, exact_downlink=arguments.exact), label)


def config_of_run(arguments: argparse.Namespace, seed: int, k: int) -> Config:
    """The method's config with few tokens a step, and more sites than the demo has names for."""
    base = config_of(
        METHODS[arguments.method], model=arguments.model, sites=1, data="eras",
        rounds=arguments.rounds, seed=seed,
    )  # fmt: skip
    if arguments.sites < 1:
        raise ConfigError(f"--sites {arguments.sites} is out of range: at least 1")
    names = [f"site{index:02d}" for index in range(arguments.sites)]
    return changed(
        base,
        {
            "model.seq_len": 64,
            "data.batch": 1,
            "data.sites": dict(zip(names, eras(arguments.sites), strict=True)),
            "inner.steps": arguments.steps,
            "outer.alpha": arguments.alpha,
            "codec.k": k,
            "codec.k_sites": arguments.k_sites,
            "codec.bits": arguments.bits,
        },
    )


def measured(run: Lockstep) -> dict[str, float]:
    """Loss at the end; bits a parameter and round, the mean over rounds."""
    bits = 8 / run.simulation.layout.num_parameters / len(run.rounds)
    return {
        "val_bpb_end": run.simulation.evaluate(),
        "bits_up": bits * sum(done.bytes_up for done in run.rounds),
        "bits_down": bits * sum(done.bytes_down for done in run.rounds),
    }


if __name__ == "__main__":
    main()
