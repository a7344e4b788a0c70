"""What asking for the members of every step costs: ElasticSite against a static group.

    python -m benchmarks.torchft_cost --json        3 ranks, 10 M parameters, gloo on this machine

Both train the same model in the same processes and take turns step by step, so that whatever else
the machine does hits both; the result is the median over steps of the ratio of the two times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from prometheus_client import CollectorRegistry

from loco.config import Config
from loco.inner.groups import Group
from loco.metrics import Catalogue, WireMetrics
from loco.model import layout_of, pack
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
WARM_UP_STEPS = 3
PLAN = pb.RoundPlan(first_step=0, total_steps=1000)


def config_of(size: str, sync: str) -> Config:
    """One sequence a rank: little arithmetic, so that the cost of a step is seen."""
    model = {"num_heads": 6 if size == "10M" else 4, "num_kv_heads": 2, "seq_len": 64}
    return Config.model_validate(
        {
            "model": {**model, **SIZES[size]},
            "data": {"batch": 3},
            "inner": {"sync": sync},
            "eval": {"sequences": 3},
        }
    )


def elastic_trainer(config: Config, corpus: str, rank: int, lighthouse: str) -> Trainer:
    """A trainer whose site asks for its members in every step, with a group formed."""
    site = ElasticSite(
        torch.device("cpu"),
        lighthouse,
        slot=rank,
        rules=Rules(target_size=3, start_seconds=600.0, heal_seconds=60.0),
        interface="127.0.0.1",
        rank_timeout_seconds=30.0,
        patience_seconds=600.0,
        shard_backup=False,
    )
    trainer = Trainer(config, site, "paris", corpus)
    layout = layout_of(trainer.model)
    exchange = ReplicatedExchange(config, site, trainer.model, layout)
    exchange.load(pack(trainer.model, layout).tobytes(), 0)
    session = Session("127.0.0.1:1", "paris", 1.0, WireMetrics(Catalogue(CollectorRegistry())))
    site.meet(WorkerReplica(trainer, exchange, Progress(), session, Pulse()))
    site.transition(lambda: None)
    return trainer


def rank_main(rank: int, folder: str, lighthouse: str, size: str, sync: str, steps: int) -> None:
    """Turns of both; rank 0 writes the times."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=3)
    config, corpus = config_of(size, sync), f"{folder}/text.txt"
    static = Trainer(config, Site(torch.device("cpu"), Group()), "paris", corpus)
    elastic = elastic_trainer(config, corpus, rank, lighthouse)
    times: dict[str, list[float]] = {"static": [], "torchft": []}
    for step in range(WARM_UP_STEPS + steps):
        # Who goes first alternates: the second of a pair finds warmer caches.
        pair = [("static", static), ("torchft", elastic)]
        for name, trainer in pair if step % 2 else pair[::-1]:
            dist.barrier()
            started = time.perf_counter()
            trainer.train(1, PLAN)
            dist.barrier()  # a step is over when all ranks have made it
            if step >= WARM_UP_STEPS:
                times[name].append(time.perf_counter() - started)
    if rank == 0:
        told = elastic._site.membership()
        quorum = told.quorum_seconds / told.quorums
        num = sum(p.numel() for p in static.model.parameters())
        found = {"times": times, "quorum_seconds": quorum, "parameters": num}
        Path(folder, "times.json").write_text(json.dumps(found))
    dist.barrier()
    elastic._site.close()
    dist.destroy_process_group()


def measure(size: str, sync: str, steps: int) -> dict[str, Any]:
    """One configuration on three ranks."""
    address = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory(prefix="loco-torchft-cost-") as folder:
        Path(folder, "text.txt").write_text("the five boxing wizards jump quickly. " * 2000)
        lighthouse = subprocess.Popen(lighthouse_command(address, 30.0))
        try:
            mp.spawn(rank_main, (folder, address, size, sync, steps), nprocs=3)
        finally:
            lighthouse.terminate()
            lighthouse.wait()
        found = json.loads(Path(folder, "times.json").read_text())
    static, torchft = found["times"]["static"], found["times"]["torchft"]
    return {
        "sync": sync,
        "parameters": found["parameters"],
        "ranks": 3,
        "steps": steps,
        "static_ms": 1e3 * statistics.median(static),
        "torchft_ms": 1e3 * statistics.median(torchft),
        "quorum_ms": 1e3 * found["quorum_seconds"],
        "ratio": statistics.median(b / a for a, b in zip(static, torchft, strict=True)),
    }


def main() -> None:
    """Print a line, or a JSON object, for each way to synchronise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="10M")
    parser.add_argument("--sync", nargs="+", default=["dense", "scape"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ.setdefault("RUST_LOG", "error")
    for sync in arguments.sync:
        found = measure(arguments.size, sync, arguments.steps)
        line = (
            f"{sync}: static {found['static_ms']:.1f} ms, torchft {found['torchft_ms']:.1f} ms a "
            f"step of {found['parameters']} parameters, ratio {found['ratio']:.3f}; a quorum "
            f"{found['quorum_ms']:.2f} ms"
        )
        print(json.dumps(found) if arguments.json else line, flush=True)


if __name__ == "__main__":
    main()
