"""torchft's DiLoCo as a rival: the real package, a process a site, gloo on the loopback.

The same model, samples, inner optimizer and schedule as benchmarks/simulation.py, torchft's own
manager, lighthouse and outer loop, with the settings that are fair to it (`init_sync=False`, one
call a tensor: with buckets torchft 0.2.0 copies back only the last one).
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import TCPStore

from benchmarks.simulation import all_reduce_bytes, streams_of, total_steps
from loco.config import Config, config_from_json
from loco.data import DataStream, bits_per_byte, evaluate, load_tokens, validation_windows
from loco.inner import DenseSync
from loco.inner.build import build_inner, lr_at
from loco.inner.groups import Group
from loco.model import build_model, layout_of
from worker.elastic.supervisor import free_port

if TYPE_CHECKING:
    from torchft import Manager

HOST = "127.0.0.1"
TIMEOUT = timedelta(seconds=600)
"""Of a collective and of a quorum: sites share two cores, and nobody dies here."""


def torchft_run(config: Config) -> dict[str, Any]:
    """Train the sites of `config` and measure what benchmarks.convergence measures.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a site failed; its traceback is in it.
    """
    os.environ.setdefault("RUST_LOG", "error")  # it would log every quorum; read at the import
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    from torchft.coordination import LighthouseServer

    address = f"{HOST}:{free_port()}"
    sites = len(config.data.sites)
    with tempfile.TemporaryDirectory(prefix="loco-torchft-diloco-") as folder:
        # Not before all sites have asked: with fewer, the first one would train alone.
        lighthouse = LighthouseServer(bind=address, min_replicas=sites)
        try:
            mp.spawn(site_main, (config.to_json(), address, folder), nprocs=sites)
        finally:
            lighthouse.shutdown()
        found = [json.loads(Path(folder, f"{i}.json").read_text()) for i in range(sites)]
    dense = layout_of(build_model(config.model, seed=0)).dense_bytes
    losses: dict[int, float] = {int(done): bpb for done, bpb in found[0]["val_bpb"].items()}
    sent = all_reduce_bytes(dense, sites)
    mean = [sum(nats) / sites for nats in zip(*(one["nats"] for one in found), strict=True)]
    return {
        "params": dense // 4,
        "dense_bytes": dense,
        "val_bpb": losses,
        "val_bpb_end": losses[config.run.rounds],
        "times_smaller_up": dense / sent,
        "times_smaller_down": dense / sent,
        "times_smaller_up_last_round": dense / sent,
        "cpu_seconds": round(sum(one["cpu_seconds"] for one in found), 1),
        "traces": {
            "train_bpb": [round(bits_per_byte(nats, 1), 5) for nats in mean],
            "bytes_up": [sent] * config.run.rounds,
            "bytes_down": [sent] * config.run.rounds,
        },
    }


def site_main(index: int, config_json: str, lighthouse: str, folder: str) -> None:
    """One site: trains all rounds, writes what it measured, ends without torchft's own clean-up."""
    torch.set_num_threads(1)
    started = time.process_time()
    config = config_from_json(config_json)
    model = build_model(config.model, seed=config.run.seed)
    site = sorted(config.data.sites)[index]
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    sites = len(config.data.sites)
    manager = manager_of(model, store, sites=sites, site=site, lighthouse=lighthouse)
    found = train(config, model, manager, index)
    found["cpu_seconds"] = time.process_time() - started
    Path(folder, f"{index}.json").write_text(json.dumps(found))
    manager.shutdown(wait=False)
    os._exit(0)  # its threads abort the interpreter's own end now and then


def manager_of(
    model: nn.Module, store: TCPStore, *, sites: int, site: str, lighthouse: str
) -> Manager:
    """torchft's manager of one site; a round needs all of `sites`.

    `store` listens at this host's address, and must outlive the manager.
    """
    from torchft import Manager, ProcessGroupGloo

    return Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=model.load_state_dict, state_dict=model.state_dict,
        min_replica_size=sites, use_async_quorum=False, init_sync=False,
        timeout=TIMEOUT, quorum_timeout=TIMEOUT,
        rank=0, world_size=1, store_addr=store.host, store_port=store.port,
        lighthouse_addr=f"http://{lighthouse}", replica_id=site, hostname=store.host,
    )  # fmt: skip


def train(config: Config, model: nn.Module, manager: Manager, index: int) -> dict[str, Any]:
    """All rounds of one site: mean nats a round, and site 0's loss on held-out text."""
    from torchft.local_sgd import DiLoCo

    inner = build_inner(config.inner, model, Group())
    assert isinstance(inner, DenseSync), "torchft hooks into a torch optimizer: inner.sync = dense"
    outer = torch.optim.SGD(
        model.parameters(), lr=config.outer.alpha, momentum=config.outer.momentum, nesterov=True
    )
    stream = streams_of(config)[index]
    held_out = validation_windows(
        load_tokens(config.data.corpus, "validation"),
        seq_len=config.model.seq_len,
        count=config.eval.sequences,
    )
    nats: list[float] = []
    losses = {0: bits_per_byte(*evaluate(model, held_out))} if index == 0 else {}
    steps = itertools.count()
    with DiLoCo(manager, [model], inner.optimizer, outer, config.inner.steps):
        for done in range(1, config.run.rounds + 1):
            round_ = [inner_step(config, model, inner, stream, next(steps))
                      for _ in range(config.inner.steps)]  # fmt: skip
            nats.append(sum(round_) / len(round_))
            every = config.eval.every_rounds
            # Right after the last step of a round the replica holds the global parameters.
            if index == 0 and (done == config.run.rounds or (every and done % every == 0)):
                losses[done] = bits_per_byte(*evaluate(model, held_out))
    return {"nats": nats, "val_bpb": losses}


def inner_step(
    config: Config, model: nn.Module, inner: DenseSync, stream: DataStream, step: int
) -> float:
    """One step as a simulated site makes it; the mean loss in nats."""
    for group in inner.param_groups:
        group["lr"] = lr_at(config.inner, step, total_steps(config))
    inner.zero_grad()
    loss = model(*stream.batch(step))
    loss.backward()
    inner.step()
    return loss.item()
