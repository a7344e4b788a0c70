"""Loss against bytes: a resumable grid of runs, one JSON line a run.

    python -m benchmarks.convergence --out build/runs.jsonl                    # SparseLoCo, seed 0
    python -m benchmarks.convergence --out build/runs.jsonl \\
        --method ddp localsgd diloco torchft-diloco sparseloco --seed 0 1 2
    python -m benchmarks.convergence --out build/runs.jsonl --model small \\
        --vary codec.k 32 64 128 --vary inner.steps 10 15 30 60 --steps 900

Every combination of method (benchmarks/methods.py), seed and varied keys runs once; a combination
whose line is in the file already is skipped. Sites are simulated in this process, on one thread,
by the code of a real run (benchmarks/simulation.py); `real` and torchft's DiLoCo run in processes.
On a GPU, models and batches lie there (nobody has run this on one yet):

    python -m benchmarks.convergence --out build/runs.jsonl --model 125m --device cuda \\
        --steps 3000 --data domains --sites 3 --method ddp localsgd diloco kept-5 sparseloco
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import platform
import re
import resource
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.methods import METHODS, MODELS, Data, Method, changed, config_of
from benchmarks.simulation import Round, Simulation, all_reduce_bytes, total_steps
from benchmarks.torchft_diloco import torchft_run
from loco.config import Config
from loco.demo.report import ProgressView
from loco.demo.run import run_processes
from loco.digest import chunk_hashes, theta_digest
from loco.errors import ConfigError

TRACES = ("train_bpb", "bytes_up", "bytes_down", "ef_norm", "support_overlap")
DIGITS = 6  # significant ones of a trace: what a plot can show


def main() -> None:
    arguments = parse_arguments()
    try:
        run_grid(arguments)
    except ConfigError as error:
        sys.exit(f"benchmarks.convergence: {error}")


def run_grid(arguments: argparse.Namespace) -> None:
    """Make every run that is not in the file yet."""
    torch.set_num_threads(1)
    if arguments.out.is_dir():
        raise ConfigError(f"--out {arguments.out} is a directory: name a file of JSON lines")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.touch()
    for label, config in grid(arguments):
        if label["key"] in keys_in(arguments.out):  # another process may have made it meanwhile
            continue
        result = label | run(config, METHODS[label["method"]], arguments.device)
        with arguments.out.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(summary(result), flush=True)


def keys_in(path: Path) -> set[str]:
    """Of the runs in a file of JSON lines; ConfigError where it has a line that is none."""
    keys = set()
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            keys.add(json.loads(line)["key"])
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ConfigError(
                f"--out {path}: line {number} is no run, or was cut off when a run was killed; "
                "remove it, and the run is made again"
            ) from None
    return keys


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; runs in it are done")
    parser.add_argument("--method", nargs="+", default=["sparseloco"], choices=METHODS)
    parser.add_argument("--model", default="demo", choices=MODELS)
    parser.add_argument("--data", default="eras", choices=get_args(Data), help="of the sites")
    parser.add_argument("--seed", nargs="+", type=int, default=[0])
    parser.add_argument("--sites", type=int, default=2, help="3 for domains")
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "cuda"), help="of simulated sites"
    )
    parser.add_argument("--rounds", type=int, help="instead of the preset's")
    parser.add_argument("--steps", type=int, help="inner steps of the whole run, whatever H is")
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
    """Every combination as (what identifies it, config)."""
    keys = [key for key, *_ in arguments.vary]
    values = [[toml_value(key, text) for text in texts] for key, *texts in arguments.vary]
    for name, seed, *combination in itertools.product(arguments.method, arguments.seed, *values):
        base = config_of(
            METHODS[name],
            model=arguments.model,
            sites=arguments.sites,
            data=arguments.data,
            rounds=arguments.rounds,
            seed=seed,
        )
        changes = dict(zip(keys, combination, strict=True))
        config = changed(base, changes)
        if arguments.steps:
            rounds = max(1, arguments.steps // config.inner.steps)
            config = changed(config, {"run.rounds": rounds})
        label = {
            "key": key_of(METHODS[name], config),
            "method": name,
            "model": arguments.model,
            "data": arguments.data,
            "sites": arguments.sites,
            "seed": seed,
            "changes": changes,
        }
        yield label, config


def key_of(method: Method, config: Config) -> str:
    """Names a run. Keys at their defaults do not count, so that a new one makes nothing stale."""
    said = json.dumps([method.runner, config.model_dump(mode="json", exclude_defaults=True)])
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def run(config: Config, method: Method, device: str = "cpu") -> dict[str, Any]:
    """One run: loss, bytes, and what happened in each round.

    Raises:
        ConfigError: there is no such device, or the method runs in processes, on CPUs.
    """
    check_device(device, method)
    commit = ["git", "describe", "--always", "--dirty"]
    runners = {"torchft": torchft_run, "processes": real_run}
    runner = runners.get(method.runner)
    found = runner(config) if runner else simulated_run(config, method, device)
    return {
        "rounds": config.run.rounds,
        "inner_steps": config.inner.steps,
        "lr": config.inner.lr,
        "device": device,
        "k": config.codec.k,
        "tokens_per_site": total_steps(config) * config.data.batch * config.model.seq_len,
        "commit": subprocess.run(commit, capture_output=True, text=True).stdout.strip(),
        "machine": machine(device),
        **found,
    }


def machine(device: str) -> str:
    """Its processor, and of a CPU the widest instructions that torch uses: sums differ by them."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    said = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    name = said[1] if said else platform.machine()  # Arm's kernels name no model
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def toml_value(key: str, text: str) -> Any:
    """A value of --vary; ConfigError if it is none."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        raise ConfigError(
            f"--vary {key}: {text!r} is no TOML value; a string has quotes of its own: "
            f"--vary {key} '\"{text}\"'"
        ) from None


def check_device(device: str, method: Method) -> None:
    """ConfigError unless a run of the method can be on `device`."""
    if device == "cpu":
        return
    if method.runner in ("torchft", "processes"):
        raise ConfigError(
            f"--device {device} is for simulated sites, {method.title!r} runs processes on CPUs: "
            "leave it out, or choose other methods"
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            f"--device {device}: torch {torch.__version__} finds no GPU here; leave the "
            "flag out to train on the CPU"
        )


def simulated_run(config: Config, method: Method, device: str = "cpu") -> dict[str, Any]:
    """Train in this process."""
    started = time.process_time()
    data_parallel = method.runner == "data_parallel"
    simulation = Simulation(config, data_parallel=data_parallel, device=device)
    losses = {0: simulation.evaluate()}
    rounds: list[Round] = []
    for done in simulation.rounds():
        rounds.append(done)
        every = config.eval.every_rounds
        if len(rounds) == config.run.rounds or (every and len(rounds) % every == 0):
            losses[len(rounds)] = simulation.evaluate()
    dense = simulation.layout.dense_bytes
    traces: dict[str, list[float]] = {
        name: [short(getattr(done, name)) for done in rounds] for name in TRACES
    }
    if method.runner == "data_parallel":
        sent = config.inner.steps * all_reduce_bytes(dense, len(config.data.sites))
        traces |= {"bytes_up": [sent] * len(rounds), "bytes_down": [sent] * len(rounds)}
    return {
        "params": simulation.layout.num_parameters,
        "dense_bytes": dense,
        "val_bpb": losses,
        "val_bpb_end": losses[len(rounds)],
        "times_smaller_up": len(rounds) * dense / sum(traces["bytes_up"]),
        "times_smaller_down": len(rounds) * dense / sum(traces["bytes_down"]),
        "times_smaller_up_last_round": dense / traces["bytes_up"][-1],
        "last_round": asdict(rounds[-1]),
        "theta_digest": theta_digest(chunk_hashes(simulation.theta)),
        **of_each_part(simulation),
        "cpu_seconds": round(time.process_time() - started, 1),
        "traces": traces,
    }


def of_each_part(simulation: Simulation) -> dict[str, Any]:
    """Loss of theta on what is held out of each site's corpus; eras have that in common."""
    corpora = simulation.config.data.sites.values()
    if all(corpus.startswith("sotu") for corpus in corpora):
        return {}
    return {"val_bpb_parts": {Path(name).stem: simulation.evaluate(name) for name in corpora}}


def real_run(config: Config) -> dict[str, Any]:
    """A coordinator and sites of one rank each as processes; bytes are those at its transport."""
    names = sorted(config.data.sites)
    before = children_seconds()
    status = run_processes(config, names, 1, ProgressView(config, quiet=True))
    dense = status["dense_bytes_per_round"]
    rounds = config.run.rounds
    up, down = (
        sum(site[key] for site in status["sites"]) / len(names) / rounds
        for key in ("bytes_up", "bytes_down")
    )
    losses = {m["round"]: m["bits_per_byte"] for m in status["validation"]}
    return {
        "params": status["params"],
        "dense_bytes": dense,
        "val_bpb": losses,
        "val_bpb_end": losses[rounds],
        "times_smaller_up": dense / up,
        "times_smaller_down": dense / down,
        "times_smaller_up_last_round": dense / up,
        "theta_digest": status["theta_digest"],
        "cpu_seconds": round(children_seconds() - before, 1),
        "traces": {"bytes_up": [round(up)] * rounds, "bytes_down": [round(down)] * rounds},
    }


def children_seconds() -> float:
    """CPU time of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def short(value: float) -> float:
    """A number with six digits, whole where it was whole."""
    return value if isinstance(value, int) else float(f"{value:.{DIGITS}g}")


def summary(result: dict[str, Any]) -> str:
    return (
        f"{result['method']} {result['model']} {result['data']} seed {result['seed']} "
        f"{result['changes']}: {result['val_bpb_end']:.4f} bits per byte, "
        f"up {result['times_smaller_up']:.3g}x smaller "
        f"({result['times_smaller_up_last_round']:.3g}x in the last round), "
        f"{result['cpu_seconds']:.0f} s"
    )


if __name__ == "__main__":
    main()
