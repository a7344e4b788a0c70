"""What the downlink costs in bits and loss: one simulated run, one JSON line.

    python -m benchmarks.downlink --sites 20 --seed 0 --out build/downlink.jsonl          # as built
    python -m benchmarks.downlink --sites 20 --seed 0 --exact --k-sites 20 --out ...      # control

The demo's model; sites are eras of its corpus, each with a sequence of 64 bytes an inner step, so
that twenty of them fit on one core. Bits are those of payloads, headers included, over parameters.
"""

from __future__ import annotations

import argparse
import json
import time
import tomllib
from pathlib import Path

import torch

from benchmarks.fleet import FleetSimulation
from loco import codec
from loco.config import Config, preset_text
from loco.data.eras import eras


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    codec.warm_up()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    line = {name: value for name, value in vars(arguments).items() if name != "out"} | run(
        config_of(arguments), exact=arguments.exact
    )
    with arguments.out.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON lines")
    parser.add_argument("--sites", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=10, help="H")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--k-sites", type=int, default=3)
    parser.add_argument("--bits", type=int, default=2, help="of a value, up")
    parser.add_argument("--alpha", type=float, default=1.0)
    parser.add_argument("--exact", action="store_true", help="the update in fp32")
    return parser.parse_args()


def config_of(arguments: argparse.Namespace) -> Config:
    """The tiny preset with dense AdamW, as many sites as asked for, and no ramp of k."""
    raw = tomllib.loads(preset_text("tiny"))
    raw["run"] |= {"rounds": arguments.rounds, "seed": arguments.seed}
    raw["model"] |= {"seq_len": 64}
    names = [f"site{index:02d}" for index in range(arguments.sites)]
    raw["data"] |= {"batch": 1, "sites": dict(zip(names, eras(arguments.sites), strict=True))}
    raw["inner"] |= {"sync": "dense", "lr": 2e-3, "steps": arguments.steps}
    raw["outer"] |= {"alpha": arguments.alpha}
    raw["codec"] = {"k": arguments.k, "k_sites": arguments.k_sites, "bits": arguments.bits}
    return Config.model_validate(raw)


def run(config: Config, *, exact: bool) -> dict[str, float | dict[int, float]]:
    """Loss of every tenth round, and bits a parameter and round, the mean over rounds."""
    started = time.process_time()
    simulation = FleetSimulation(config, exact_downlink=exact)
    losses, rounds = {}, []
    for done in simulation.rounds():
        rounds.append(done)
        if len(rounds) % 10 == 0:
            losses[len(rounds)] = simulation.evaluate()
    bits = 8 / simulation.layout.num_parameters / len(rounds)
    return {
        "val_bpb": losses,
        "val_bpb_end": simulation.evaluate(),
        "bits_up": bits * sum(done.bytes_up for done in rounds),
        "bits_down": bits * sum(done.bytes_down for done in rounds),
        "cpu_seconds": time.process_time() - started,
    }


if __name__ == "__main__":
    main()
