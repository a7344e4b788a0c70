"""One site of the WAN benchmark: started by benchmarks.wan on a host of its own.

The inner steps are paced: a step moves the parameters at random and then sleeps until `--step-ms`
are over, so that the link and not this machine's cores decides. Everything else is the real thing:
loco's worker, or torchft's DiLoCo with its manager and gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.netns import INTERFACE
from benchmarks.torchft_diloco import manager_of
from loco.config import Config, load_config
from loco.model import build_model

WARM_UP_ROUNDS = 2
"""Rounds before anything counts: connections open, windows grow, kernels compile."""
WATCH_SECONDS, BULK_BYTES = 0.01, 64 * 1024  # a look at the card; more than acknowledgements take
LONG_BYTES = 16 * 1024 * 1024  # so much is bulk whenever it is looked at


class Transfers:
    """When each round's shards or update were on their way, and how many bytes they had.

    `counter` is what the card counts of it: 0 sent, 1 received bytes.
    """

    def __init__(self, counter: int) -> None:
        self.begun: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        self.moved: dict[int, float] = {}
        self.bytes: Counter[int] = Counter()
        self._counter = counter
        self._parts: Counter[int] = Counter()
        self._whole: set[int] = set()

    def begin(self, round_: int) -> None:
        """Of several parts only the first one counts."""
        if round_ not in self.begun:
            self.begun[round_] = self.moved[round_] = time.monotonic()
            threading.Thread(target=self._watch, args=(round_,), daemon=True).start()

    def _watch(self, round_: int) -> None:
        """When bulk last passed the card: what comes after it is no transfer any more."""
        last = card()[self._counter]
        while round_ not in self._whole:
            time.sleep(WATCH_SECONDS)
            now = card()[self._counter]
            if now - last > BULK_BYTES:
                self.moved[round_] = time.monotonic()
            last = now

    def end(self, round_: int, num_bytes: int, num_parts: int = 1) -> None:
        """One of so many parts is there."""
        self.ended[round_] = time.monotonic()
        self.bytes[round_] += num_bytes
        self._parts[round_] += 1
        if self._parts[round_] == num_parts:
            self._whole.add(round_)

    def report(self, name: str) -> dict[str, float]:
        """Medians over the counted rounds; nothing where nothing was moved by itself."""
        rounds = sorted(self.ended)[WARM_UP_ROUNDS:]
        if not rounds:
            return {}
        seconds = statistics.median(self.ended[r] - self.begun[r] for r in rounds)
        size = statistics.median(self.bytes[r] for r in rounds)
        found = {f"{name}_bytes": size, f"{name}_seconds": seconds}
        if size >= LONG_BYTES:
            line_seconds = statistics.median(self.moved[r] - self.begun[r] for r in rounds)
            found[f"{name}_line_seconds"] = line_seconds
        return found


class Pace:
    """What an inner step costs, and when each was made."""

    def __init__(self, model: nn.Module, step_seconds: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._params = [p for p in model.parameters() if p.requires_grad]
        self._noise = [1e-3 * torch.randn(p.shape, generator=generator) for p in self._params]
        self._seconds = step_seconds
        self._generator = generator
        self.steps: list[tuple[float, float]] = []
        self.cpu: list[tuple[float, float]] = []
        self.counters: list[tuple[int, int]] = []
        self.uploads, self.downloads = Transfers(0), Transfers(1)

    @torch.no_grad()
    def step(self) -> None:
        """Move the parameters; return when the step's time is over."""
        started, cpu = time.monotonic(), time.thread_time()
        self.counters.append(card())
        for p, noise in zip(self._params, self._noise, strict=True):
            p.add_(noise, alpha=float(torch.randn((), generator=self._generator)))
        time.sleep(max(0.0, started + self._seconds - time.monotonic()))
        self.steps.append((started, time.monotonic()))
        self.cpu.append((cpu, time.thread_time()))

    def report(self, steps_a_round: int) -> dict[str, float]:
        """From the first counted round's first step to the first step of the last round."""
        first, last = WARM_UP_ROUNDS * steps_a_round, len(self.steps) - steps_a_round
        rounds = (last - first) / steps_a_round
        window = self.steps[last][0] - self.steps[first][0]
        computing = sum(end - start for start, end in self.steps[first:last])
        outside = self.cpu[last][0] - self.cpu[first][0]
        outside -= sum(end - start for start, end in self.cpu[first:last])
        sent, received = (b - a for a, b in zip(self.counters[first], self.counters[last]))  # noqa: B905
        return {
            "compute_utilisation": computing / window,
            "steps_on_time": (last - first) * self._seconds / window,
            "sync_seconds": (window - computing) / rounds,
            "sync_cpu_seconds": outside / rounds,
            "wire_bytes_up": sent / rounds,
            "wire_bytes_down": received / rounds,
            "rounds": rounds,
            "longest_gap_seconds": max(
                b[0] - a[1]
                for a, b in zip(self.steps[first:last], self.steps[first + 1 :])  # noqa: B905
            ),
            "steps": len(self.steps),
            **self.uploads.report("upload"),
            **self.downloads.report("download"),
        }


def card() -> tuple[int, int]:
    """Bytes sent and received by this host's card, IP headers included."""
    folder = Path(f"/sys/class/net/{INTERFACE}/statistics")
    return int((folder / "tx_bytes").read_text()), int((folder / "rx_bytes").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--system", choices=("loco", "torchft"), required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--coordinator", required=True, help="HOST:PORT; torchft: its lighthouse")
    parser.add_argument("--site", required=True)
    parser.add_argument("--address", required=True, help="of this host")
    parser.add_argument("--sites", type=int, required=True)
    parser.add_argument("--step-ms", type=float, required=True)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--bucket-mb", type=int, default=0, help="torchft: 0 is one tensor a call")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = load_config(args.config)
    pace = (loco_site if args.system == "loco" else torchft_site)(args, config)
    args.out.write_text(json.dumps(pace.report(config.inner.steps)))
    if args.system == "torchft":
        os._exit(0)  # its threads abort the interpreter's own end now and then


def loco_site(args: argparse.Namespace, config: Config) -> Pace:  # noqa: ARG001 (it asks for it)
    """A worker of one rank whose trainer is paced."""
    from prometheus_client import CollectorRegistry

    from loco.inner.groups import Group
    from loco.metrics import Catalogue, WireMetrics
    from loco.wire.v1 import coordinator_pb2 as pb
    from worker.loop import Worker
    from worker.options import Options
    from worker.session import Session
    from worker.site import Site
    from worker.trainee import Trainee
    from worker.trainer import Trainer

    paces: list[Pace] = []

    class PacedTrainer(Trainer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            paces.append(Pace(self.model, args.step_ms / 1e3, seed=hash(args.site) % 1000))

        def _inner_step(self, lr: float) -> None:  # noqa: ARG002
            paces[0].step()
            self._count(1.0, 1.0)

    class PacedWorker(Worker):
        def _make_trainer(self) -> Trainee:
            corpus = self._config.data.corpus
            return PacedTrainer(self._config, self._site, args.site, corpus)

    class TimedSession(Session):
        def begin_push(self, header: pb.PushHeader, body: bytes) -> None:
            paces[0].uploads.begin(header.round)
            super().begin_push(header, body)

        def push(self, header: pb.PushHeader, body: bytes) -> pb.PushResponse:
            paces[0].uploads.begin(header.round)
            answer = super().push(header, body)
            paces[0].uploads.end(header.round, len(body), header.num_shards)
            return answer

        def pull(self, round_: int, span: range) -> memoryview:
            paces[0].downloads.begin(round_)
            data = super().pull(round_, span)
            paces[0].downloads.end(round_, len(data))
            return data

    options = Options(
        coordinator=args.coordinator, site=args.site, data=None, device="cpu",
        patience_seconds=120.0, threads=1, metrics=None, checkpoint=None,
        checkpoint_every_rounds=1, link_mbit=None, bundle=args.bundle,
    )  # fmt: skip
    wire = WireMetrics(Catalogue(CollectorRegistry()))
    session = TimedSession(args.coordinator, args.site, 120.0, wire, options.access)
    PacedWorker(options, Site(torch.device("cpu"), Group()), session).run()
    session.close()
    return paces[0]


def torchft_site(args: argparse.Namespace, config: Config) -> Pace:
    """torchft's DiLoCo as its documentation uses it, with the settings that are fair to it."""
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE  # else it takes the loopback, where nobody is
    os.environ.setdefault("RUST_LOG", "error")
    from torch.distributed import TCPStore
    from torchft.local_sgd import DiLoCo

    model = build_model(config.model, seed=config.run.seed)
    pace = Pace(model, args.step_ms / 1e3, seed=hash(args.site) % 1000)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    store = TCPStore(args.address, 0, is_master=True, wait_for_workers=False)
    manager = manager_of(
        model, store, sites=args.sites, site=args.site, lighthouse=args.coordinator
    )
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    bucket = {"use_bucketization": True, "bucket_cap_mb": args.bucket_mb} if args.bucket_mb else {}
    with DiLoCo(manager, [model], inner, outer, config.inner.steps, **bucket):
        for _ in range(config.run.rounds * config.inner.steps):
            pace.step()
            inner.step()  # lr 0: its hooks are what synchronises
    manager.shutdown(wait=False)
    return pace


if __name__ == "__main__":
    main()
