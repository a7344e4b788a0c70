"""Step time and bytes of SCAPE and of dense optimizers, one process a rank, over a shaped link.

    python -m benchmarks.scape --ranks 4 --mbit 1000 --params 10e6 --json

Every rank is a process of one thread in a network namespace of its own (needs root; `--mbit 0`
leaves the link unshaped). A step is forward and backward of a stack of square matrices on
`--tokens` tokens, then `step()`. Methods take turns in the same processes; the median of their
turns counts. Then the same without any network, one rank, in seconds of CPU, which other load on
the machine does not change: the local cost, from which the crossover follows, the bandwidth below
which SCAPE is faster than dense AdamS.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.netns import INTERFACE, Hosts
from loco.inner import AdamS, DenseSync, Scape, preset

LAYERS = 10
PORT = 29500
SENT = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")


class Stack(nn.Module):
    """Square matrices with a norm and a residual each: `params` parameters, no attention."""

    def __init__(self, params: int) -> None:
        super().__init__()
        width = max(8, round((params / LAYERS) ** 0.5))
        self.width = width
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.relu(layer(norm(x)))
        return x.square().mean()


@dataclass
class Method:
    """One way to train; `bytes_sent` is None where only the interface counts."""

    name: str
    model: nn.Module
    width: int
    step: Callable[[], None]
    zero_grad: Callable[[], None]
    bytes_sent: Callable[[], int] | None


def main() -> None:
    args = parse()
    if args.rank is not None:
        report_rank(args)
        return
    report = measure(args)
    if args.json:
        print(json.dumps(report))
        return
    for name, row in report["methods"].items():
        print(name, *(f"{k}={v:.4g}" for k, v in row.items() if v is not None))
    print({k: v for k, v in report.items() if k != "methods"})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=1000, help="each link, each way; 0: unshaped")
    parser.add_argument("--params", type=float, default=10e6)
    parser.add_argument("--tokens", type=int, default=32, help="tokens a rank and step")
    parser.add_argument("--steps", type=int, default=3, help="steps a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--master", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the ranks in namespaces, then one alone; compare."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/networked.json"
        with Hosts(args.ranks, mbit=args.mbit or None) as hosts:
            ranks = [
                hosts.start(rank, command(args, rank, hosts.address(0), out))
                for rank in range(args.ranks)
            ]
            require_success(ranks)
        networked = json.loads(Path(out).read_text())
        alone_args = argparse.Namespace(**{**vars(args), "ranks": 1})
        out = f"{folder}/alone.json"
        require_success([subprocess.Popen(command(alone_args, 0, "", out))])
        alone = json.loads(Path(out).read_text())
    methods = networked["methods"]
    for name, row in methods.items():
        if name in alone["methods"]:
            row["alone_cpu_ms"] = alone["methods"][name]["step_ms"]
            row["alone_optimizer_cpu_ms"] = alone["methods"][name]["optimizer_ms"]
    dense = methods["dense-adams"]
    for name in [name for name in methods if name.startswith("scape")]:
        row = methods[name]
        row["speedup"] = dense["step_ms"] / row["step_ms"]
        row["local_overhead"] = row["alone_cpu_ms"] / dense["alone_cpu_ms"] - 1
        row["crossover_mbit"] = crossover_mbit(dense, row, networked["params"])
    return {**vars(args), **networked, "methods": methods}


def command(args: argparse.Namespace, rank: int, master: str, out: str) -> list[str]:
    shared = ("ranks", "params", "tokens", "steps", "turns")
    flags = [f"--{name}={getattr(args, name)}" for name in shared]
    own = [f"--rank={rank}", f"--master={master}", f"--out={out}"]
    return [sys.executable, "-m", "benchmarks.scape", *flags, *own]


def require_success(processes: list[subprocess.Popen[Any]]) -> None:
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"a rank failed: exit codes {codes}")


def crossover_mbit(dense: dict[str, Any], scape: dict[str, Any], params: int) -> float | None:
    """Bandwidth at which local cost and bytes balance; None if SCAPE costs nothing locally."""
    saved_bits = 8 * params * (dense["interface_bytes"] - scape["interface_bytes"])
    lost_seconds = (scape["alone_cpu_ms"] - dense["alone_cpu_ms"]) / 1e3
    return saved_bits / lost_seconds / 1e6 if lost_seconds > 0 else None


def report_rank(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if args.ranks > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        store = dist.TCPStore(args.master, PORT, args.ranks, args.rank == 0)
        dist.init_process_group("gloo", store=store, rank=args.rank, world_size=args.ranks)
    methods = make_methods(int(args.params), args.ranks)
    turns: dict[str, list[dict[str, float]]] = {method.name: [] for method in methods}
    for turn in range(args.turns + 1):
        for method in methods:
            measured = take_turn(method, args)
            if turn > 0:  # the first one warms up
                turns[method.name].append(measured)
    params = sum(p.numel() for p in methods[0].model.parameters())
    rows = {name: summary(taken, params) for name, taken in turns.items()}
    if args.rank == 0:
        Path(args.out).write_text(json.dumps({"params": params, "methods": rows}))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def make_methods(params: int, ranks: int) -> list[Method]:
    def fresh() -> Stack:
        torch.manual_seed(0)
        return Stack(params)

    def of(name: str, model: Stack, optimizer: DenseSync | Scape) -> Method:
        sent = lambda: optimizer.bytes_sent  # noqa: E731
        return Method(name, model, model.width, optimizer.step, optimizer.zero_grad, sent)

    model = fresh()
    methods = [of("dense-adams", model, DenseSync(AdamS(model.parameters(), lr=1e-4)))]
    if ranks > 1:  # the usual rival: gradients in buckets, while backward still runs
        model = fresh()
        ddp, adams = DistributedDataParallel(model), AdamS(model.parameters(), lr=1e-4)
        methods.append(Method("ddp-adams", ddp, model.width, adams.step, adams.zero_grad, None))
    for density in (0.1, 0.01):
        model = fresh()
        scape = Scape(model.parameters(), lr=1e-4, density=density)
        methods.append(of(f"scape-{density:g}", model, scape))
    model = fresh()
    paper = preset("paper", total_steps=0)
    methods.append(of("paper-0.01", model, Scape(model.parameters(), 1e-4, density=0.01, **paper)))
    return methods


def take_turn(method: Method, args: argparse.Namespace) -> dict[str, float]:
    """Run some steps; times in seconds, bytes, per step."""
    generator = torch.Generator().manual_seed(args.rank)
    inputs = torch.randn(args.tokens, method.width, generator=generator)
    if dist.is_initialized():
        dist.barrier()
    counted = method.bytes_sent() if method.bytes_sent else 0
    at_interface = interface_bytes()
    clock = time.perf_counter if dist.is_initialized() else time.process_time
    started, inside = clock(), 0.0
    for _ in range(args.steps):
        method.zero_grad()
        method.model(inputs).backward()
        before = clock()
        method.step()
        inside += clock() - before
    seconds = clock() - started
    return {
        "step": seconds / args.steps,
        "optimizer": inside / args.steps,
        "counted": ((method.bytes_sent() if method.bytes_sent else 0) - counted) / args.steps,
        "interface": (interface_bytes() - at_interface) / args.steps,
    }


def interface_bytes() -> int:
    return int(SENT.read_text()) if dist.is_initialized() else 0


def summary(turns: list[dict[str, float]], params: int) -> dict[str, float]:
    """Medians over the turns; bytes a parameter and step."""
    middle = {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
    return {
        "step_ms": 1e3 * middle["step"],
        "optimizer_ms": 1e3 * middle["optimizer"],
        "counted_bytes": middle["counted"] / params,
        "interface_bytes": middle["interface"] / params,
    }


if __name__ == "__main__":
    main()
