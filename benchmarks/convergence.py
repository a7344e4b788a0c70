"""Loss against bytes: a resumable grid of simulated runs, one JSON line a run.

    python -m benchmarks.convergence --out build/runs.jsonl                # the demo's recipe
    python -m benchmarks.convergence --out build/runs.jsonl \\
        --algorithm sparseloco diloco --seed 0 1 --vary inner.lr 3e-3 6e-3 --vary codec.k 64 256

Every combination of algorithm, seed and varied keys runs once, from the tiny preset as `loco demo`
would run it; a combination whose line is in the file already is skipped. One thread, so that the
CPU seconds of a run can be compared with those of another.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.simulation import Round, Simulation, total_steps
from loco.config import Config
from loco.demo.config import ALGORITHMS, INNER, DemoOptions, demo_config


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    lines = arguments.out.read_text().splitlines() if arguments.out.exists() else []
    done = {json.loads(line)["config_hash"] for line in lines}
    for label, config in grid(arguments):
        if config.hash() in done:
            continue
        result = label | run(config)
        with arguments.out.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(summary(label, result), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; runs in it are done")
    parser.add_argument("--algorithm", nargs="+", default=["sparseloco"], choices=ALGORITHMS)
    parser.add_argument("--inner", default="scape", choices=INNER)
    parser.add_argument("--seed", nargs="+", type=int, default=[0])
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="instead of the preset's")
    parser.add_argument(
        "--vary",
        nargs="+",
        action="append",
        default=[],
        metavar=("KEY", "VALUE"),
        help="a dotted config key and the TOML values to try",
    )
    return parser.parse_args()


def grid(arguments: argparse.Namespace) -> Iterator[tuple[dict[str, Any], Config]]:
    """Every combination as (what was varied, config)."""
    keys = [key for key, *_ in arguments.vary]
    values = [[tomllib.loads(f"x = {text}")["x"] for text in texts] for _, *texts in arguments.vary]
    for algorithm, seed in itertools.product(arguments.algorithm, arguments.seed):
        options = DemoOptions(
            algorithm=algorithm,
            inner=arguments.inner,
            sites=arguments.sites,
            ranks=1,
            rounds=arguments.rounds,
            seed=seed,
        )
        base, _ = demo_config(options)
        for combination in itertools.product(*values):
            changes = dict(zip(keys, combination, strict=True))
            yield {"algorithm": algorithm, "seed": seed, "changes": changes}, changed(base, changes)


def changed(config: Config, changes: dict[str, Any]) -> Config:
    """The config with dotted keys replaced; None (TOML has none) is the string "none"."""
    raw = config.model_dump()
    for key, value in changes.items():
        section, field = key.split(".")
        raw[section][field] = None if value == "none" else value
    return Config.model_validate(raw)


def run(config: Config) -> dict[str, Any]:
    """Simulate one run and measure loss and bytes."""
    started = time.process_time()
    simulation = Simulation(config)
    losses = {0: simulation.evaluate()}
    rounds: list[Round] = []
    for done in simulation.rounds():
        rounds.append(done)
        every = config.eval.every_rounds
        if len(rounds) == config.run.rounds or (every and len(rounds) % every == 0):
            losses[len(rounds)] = simulation.evaluate()
    return {
        "config_hash": config.hash(),
        "params": simulation.layout.num_parameters,
        "rounds": config.run.rounds,
        "tokens_per_site": total_steps(config) * config.data.batch * config.model.seq_len,
        "val_bpb": losses,
        "val_bpb_end": losses[len(rounds)],
        "train_bpb_end": rounds[-1].train_bpb,
        "cpu_seconds": time.process_time() - started,
        **traffic(rounds, dense_bytes=simulation.layout.dense_bytes),
    }


def traffic(rounds: list[Round], *, dense_bytes: int) -> dict[str, float]:
    """Bytes of one site, and how many times smaller they are than dense fp32 rounds."""
    up = sum(done.bytes_up for done in rounds)
    down = sum(done.bytes_down for done in rounds)
    last = rounds[-1]
    return {
        "bytes_up": up,
        "bytes_down": down,
        "times_smaller_up": len(rounds) * dense_bytes / up,
        "times_smaller_down": len(rounds) * dense_bytes / down,
        "times_smaller_up_last_round": dense_bytes / last.bytes_up,
        "bits_per_value_up_last_round": 8 * last.bytes_up / last.values_up,
    }


def summary(label: dict[str, Any], result: dict[str, Any]) -> str:
    return (
        f"{label['algorithm']} seed {label['seed']} {label['changes']}: "
        f"{result['val_bpb_end']:.4f} bits per byte, up {result['times_smaller_up']:.0f}x smaller "
        f"({result['times_smaller_up_last_round']:.0f}x in the last round), "
        f"{result['cpu_seconds']:.0f} s"
    )


if __name__ == "__main__":
    main()
