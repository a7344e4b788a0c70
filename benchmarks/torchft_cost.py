"""What asking for the members of every step costs: ElasticSite against a static group.

    python -m benchmarks.torchft_cost --json        3 ranks, 10 M parameters, gloo; 4 minutes

Both train the same model in the same processes and take turns in blocks of a few steps, in the
order A B B A, so that whatever else the machine does hits both. Of each pair of neighbouring blocks
the ratio is taken; reported are its median over the pairs, the interval in which that median lies
with 95 % (bootstrap), and the same for CPU time, which waiting for a busy core does not change. CPU
time is that of all ranks, with torchft's threads in them, and of the lighthouse in either block.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from prometheus_client import CollectorRegistry

from loco.config import Config
from loco.inner.groups import Group
from loco.metrics import Catalogue, WireMetrics
from loco.model import layout_of, pack
from loco.wire.access import Access
from loco.wire.v1 import coordinator_pb2 as pb
from worker.elastic.host import Rules
from worker.elastic.lighthouse import command as lighthouse_command
from worker.elastic.outer import ReplicatedExchange
from worker.elastic.replica import WorkerReplica
from worker.elastic.site import ElasticSite
from worker.elastic.supervisor import free_port
from worker.progress import Progress
from worker.pulse import Pulse
from worker.session import Session
from worker.site import Site
from worker.trainer import Trainer

SIZES = {"10M": {"dim": 384, "num_layers": 6, "ffn_dim": 1152}, "1M": {"dim": 128, "ffn_dim": 384}}
RANKS = 3
WARM_UP_STEPS = 3
RESAMPLES = 2000
PLAN = pb.RoundPlan(first_step=0, total_steps=1000)


class Block(NamedTuple):
    """A few steps of one kind."""

    wall_seconds: float
    cpu_seconds: float
    """Of all ranks and the lighthouse."""


def config_of(size: str, sync: str) -> Config:
    """One sequence a rank: little arithmetic, so that the cost of a step is seen."""
    model = {"num_heads": 6 if size == "10M" else 4, "num_kv_heads": 2, "seq_len": 64}
    return Config.model_validate(
        {
            "model": {**model, **SIZES[size]},
            "data": {"batch": RANKS},
            "inner": {"sync": sync},
            "eval": {"sequences": RANKS},
        }
    )


class Elastic(NamedTuple):
    """One rank of a site under torchft."""

    trainer: Trainer
    site: ElasticSite
    replica: WorkerReplica


def build_elastic(
    config: Config, corpus: str, rank: int, lighthouse: str, start_seconds: float
) -> Elastic:
    """A rank that has met nobody yet; `start_seconds` it waits for all of them."""
    site = ElasticSite(
        torch.device("cpu"),
        lighthouse,
        slot=rank,
        rules=Rules(target_size=RANKS, start_seconds=start_seconds, heal_seconds=60.0),
        interface="127.0.0.1",
        rank_timeout_seconds=30.0,
        patience_seconds=600.0,
        shard_backup=False,
    )
    trainer = Trainer(config, site, "paris", corpus)
    layout = layout_of(trainer.model)
    exchange = ReplicatedExchange(config, site, trainer.model, layout)
    exchange.load(pack(trainer.model, layout).tobytes(), 0)
    wire = WireMetrics(Catalogue(CollectorRegistry()))
    session = Session("127.0.0.1:1", "paris", 1.0, wire, Access())
    return Elastic(trainer, site, WorkerReplica(trainer, exchange, Progress(), session, Pulse()))


def run_block(trainer: Trainer, steps: int, lighthouse: psutil.Process) -> Block:
    """Steps of all ranks; over when all have made them."""
    dist.barrier()
    others = _cpu_seconds(lighthouse)
    cpu, started = time.process_time(), time.perf_counter()
    trainer.train(steps, PLAN)
    dist.barrier()
    wall = time.perf_counter() - started
    spent = torch.tensor([time.process_time() - cpu], dtype=torch.float64)
    dist.all_reduce(spent)
    return Block(wall, float(spent) + _cpu_seconds(lighthouse) - others)


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def rank_main(rank: int, folder: str, arguments: argparse.Namespace, sync: str, pid: int) -> None:
    """Turns of both; rank 0 writes the times."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=RANKS)
    config, corpus = config_of(arguments.size, sync), f"{folder}/text.txt"
    lighthouse = psutil.Process(pid)
    static = Trainer(config, Site(torch.device("cpu"), Group()), "paris", corpus)
    elastic, site, replica = build_elastic(
        config, corpus, rank, arguments.lighthouse, start_seconds=600.0
    )
    site.meet(replica)
    site.transition(lambda: None)
    trainers = {"static": static, "torchft": elastic}
    blocks: dict[str, list[Block]] = {name: [] for name in trainers}
    for trainer in trainers.values():
        trainer.train(WARM_UP_STEPS, PLAN)
    before = site.membership().quorum_seconds
    for pair in range(arguments.pairs):
        for name in ("static", "torchft") if pair % 2 else ("torchft", "static"):
            block = run_block(trainers[name], arguments.block_steps, lighthouse)
            blocks[name].append(block)
    if rank == 0:
        found = {
            "blocks": blocks,
            "quorum_seconds": site.membership().quorum_seconds - before,
            "parameters": sum(p.numel() for p in static.model.parameters()),
        }
        Path(folder, "times.json").write_text(json.dumps(found))
    dist.barrier()
    site.close()
    dist.destroy_process_group()


def run_ranks(rank_main: Callable[..., None], arguments: argparse.Namespace, sync: str) -> Any:
    """Run `rank_main` on all ranks beside a lighthouse; what they left in times.json."""
    arguments.lighthouse = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory(prefix="loco-torchft-") as folder:
        Path(folder, "text.txt").write_text("the five boxing wizards jump quickly. " * 2000)
        lighthouse = subprocess.Popen(lighthouse_command(arguments.lighthouse, 30.0))
        try:
            mp.spawn(rank_main, (folder, arguments, sync, lighthouse.pid), nprocs=RANKS)
        finally:
            lighthouse.terminate()
            lighthouse.wait()
        return json.loads(Path(folder, "times.json").read_text())


def measure(arguments: argparse.Namespace, sync: str) -> dict[str, Any]:
    """One configuration on three ranks."""
    found = run_ranks(rank_main, arguments, sync)
    blocks = {name: [Block(*b) for b in found["blocks"][name]] for name in found["blocks"]}
    steps = arguments.block_steps
    wall = compare(blocks, lambda block: block.wall_seconds)
    cpu = compare(blocks, lambda block: block.cpu_seconds)
    return {
        "sync": sync,
        "parameters": found["parameters"],
        "ranks": RANKS,
        "pairs": arguments.pairs,
        "block_steps": steps,
        "static_ms": round(1e3 * wall["static"] / steps, 2),
        "torchft_ms": round(1e3 * wall["torchft"] / steps, 2),
        "ratio": wall["ratio"],
        "ratio_95": wall["interval"],
        "static_cpu_ms": round(1e3 * cpu["static"] / steps, 2),
        "torchft_cpu_ms": round(1e3 * cpu["torchft"] / steps, 2),
        "cpu_ratio": cpu["ratio"],
        "cpu_ratio_95": cpu["interval"],
        "quorum_wait_ms": round(1e3 * found["quorum_seconds"] / (arguments.pairs * steps), 3),
        "load_average": os.getloadavg()[0],
    }


def compare(blocks: dict[str, list[Block]], of: Any) -> dict[str, Any]:
    """Medians of both kinds, and of the ratio of neighbouring blocks with its 95 % interval."""
    static, torchft = ([of(block) for block in blocks[name]] for name in ("static", "torchft"))
    ratios = [b / a for a, b in zip(static, torchft, strict=True)]
    rng = random.Random(0)
    medians = sorted(
        statistics.median(rng.choices(ratios, k=len(ratios)))
        for _ in itertools.repeat(None, RESAMPLES)
    )
    low, high = medians[RESAMPLES // 40], medians[-RESAMPLES // 40]
    return {
        "static": statistics.median(static),
        "torchft": statistics.median(torchft),
        "ratio": round(statistics.median(ratios), 4),
        "interval": [round(low, 4), round(high, 4)],
    }


def for_each_sync(
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace, str], dict[str, Any]],
    said: Callable[[dict[str, Any]], str],
) -> None:
    """Print a line, or a JSON object, for each way to synchronise."""
    parser.add_argument("--size", choices=SIZES, default="10M")
    parser.add_argument("--sync", nargs="+", default=["dense", "scape"])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ.setdefault("RUST_LOG", "error")
    for sync in arguments.sync:
        found = measure(arguments, sync)
        print(json.dumps(found) if arguments.json else f"{sync}: {said(found)}", flush=True)


def said(found: dict[str, Any]) -> str:
    """The same for people."""
    return (
        f"static {found['static_ms']:.1f} ms, torchft {found['torchft_ms']:.1f} ms a step of "
        f"{found['parameters']} parameters, ratio {found['ratio']:.3f} {found['ratio_95']}, of CPU "
        f"time {found['cpu_ratio']:.3f} {found['cpu_ratio_95']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=24, help="of blocks, one of each kind")
    parser.add_argument("--block-steps", type=int, default=5)
    for_each_sync(parser, measure, said)


if __name__ == "__main__":
    main()
