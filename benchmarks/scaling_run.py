"""What a coordinator spends on large models and through TLS: the measurements of docs/scaling.md.

    python -m benchmarks.scaling_run --out build/scaling.jsonl          # ten minutes, 20 GB of disk
    python -m benchmarks.scaling_run --out build/scaling.jsonl --sizes 124 --sites 2    # a minute

A real coordinator process on loopback over mutual TLS; sites that speak the wire through the
worker's own session, train nothing and hold no theta. Of a round: its CPU time, its memory and its
disk. Then its CPU time a megabyte: a snapshot sent to one site, and a dense contribution received,
which is written, synced and checked; each in plaintext, too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.rounds_run import (
    CoordinatorProcess,
    LightSite,
    random_body,
    read_run,
    together,
)
from coordinator.measure import directory_bytes
from loco.certs.authority import Authority
from loco.config import Config
from loco.layout import Layout
from loco.outer import k_of_site
from loco.wire.access import Access

Raw = dict[str, dict[str, Any]]

MODELS = {
    15: {"dim": 384, "num_layers": 10, "num_heads": 6, "num_kv_heads": 2, "ffn_dim": 1024},
    124: {"dim": 768, "num_layers": 18, "num_heads": 12, "num_kv_heads": 4, "ffn_dim": 2304},
    495: {"dim": 1536, "num_layers": 18, "num_heads": 24, "num_kv_heads": 8, "ffn_dim": 4608},
}
"""About so many million parameters; the second is the preset `125m`."""
WARM_ROUNDS, ROUNDS = 1, 4
SNAPSHOT_EVERY = WARM_ROUNDS + ROUNDS + 1  # a round later than those that count
POLL_SECONDS = 0.05
DENSE_SIZE = 124  # of the contribution whose megabytes are counted; smaller if none is so large


def run_of(size: int, sites: int, **codec: Any) -> Raw:
    """A run whose rounds close when all sites are in."""
    return {
        "run": {"name": "scaling", "rounds": 10_000, "seed": 1},
        "model": {**MODELS[size], "seq_len": 32},
        "quorum": {
            "min_sites": sites,
            "grace_seconds": 3600.0,
            "heartbeat_seconds": 1000.0,
            "dead_after_seconds": 3600.0,
        },
        "outer": {"aggregation": "mean"} if codec else {},
        "codec": codec,
        "state": {"snapshot_every_rounds": SNAPSHOT_EVERY},
        "limits": {"requests_per_second": 1e6},  # all sites share one address here
        "eval": {"every_rounds": 0},
    }


class Served:
    """A coordinator that runs, in plaintext or with certificates, and a way to be a site of it."""

    def __init__(self, directory: Path, raw: Raw, *, tls: bool) -> None:
        self._authority = Authority.create(directory / "certs") if tls else None
        bundle = self._authority and self._authority.issue(
            "coordinator", role="coordinator", hosts=("127.0.0.1",)
        )
        self.process = CoordinatorProcess(directory, raw, bundle, self._access("measures"))
        self.process.start()
        self.config: Config
        self.layout: Layout
        self.config, self.layout = read_run(self.process)

    def _access(self, name: str) -> Access:
        return Access(bundle=self._authority.issue(name) if self._authority else None)

    def site(self, name: str, body: bytes) -> LightSite:
        """One that has joined."""
        site = LightSite(self.process.address, name, body, self._access(name))
        site.join(self.layout)
        return site

    def saved(self, round_: int) -> None:
        """Wait for the snapshot at that round."""
        manifest = self.process.state / "snapshots" / str(round_) / "manifest.json"
        while not manifest.exists():
            time.sleep(POLL_SECONDS)

    def cpu_of(self, work: Callable[[], object]) -> float:
        """Seconds of CPU that the coordinator spends meanwhile."""
        before = self.process.cpu_seconds()
        work()
        return self.process.cpu_seconds() - before


@contextmanager
def serving(raw: Raw, *, tls: bool) -> Iterator[Served]:
    """The coordinator of a new run in a temporary directory."""
    directory = Path(tempfile.mkdtemp(prefix="loco-scaling-"))
    try:
        served = Served(directory, raw, tls=tls)
        try:
            yield served
        finally:
            served.process.stop()
    finally:
        shutil.rmtree(directory)


def measure_rounds(size: int, num_sites: int) -> dict[str, Any]:
    """Rounds of so many sites that send random values, as many as real ones would."""
    with serving(run_of(size, num_sites), tls=True) as served:
        codec_ = served.config.codec
        k = k_of_site(codec_.k, codec_.k_sites, num_sites)
        sites = [
            served.site(f"site-{i:02}", random_body(served.layout, k, codec_.bits, i))
            for i in range(num_sites)
        ]

        def go_to(last: int) -> None:
            together([partial(site.run, last) for site in sites])

        def go_to_the_snapshot() -> None:
            go_to(SNAPSHOT_EVERY)
            served.saved(SNAPSHOT_EVERY)

        go_to(WARM_ROUNDS)
        began = time.monotonic()
        cpu = served.cpu_of(lambda: go_to(WARM_ROUNDS + ROUNDS)) / ROUNDS
        took = (time.monotonic() - began) / ROUNDS
        with_snapshot = served.cpu_of(go_to_the_snapshot)
        return {
            "params": served.layout.num_parameters,
            "sites": num_sites,
            "k": codec_.k,
            "k_sites": codec_.k_sites,
            "rounds": SNAPSHOT_EVERY,
            "bytes_up": len(sites[0].body),
            "bytes_down": sites[0].update_bytes,
            "cpu_seconds_a_round": cpu,
            "seconds_a_round": took,
            "cpu_seconds_a_snapshot": with_snapshot - cpu,
            "peak_memory_bytes": round(1e6 * served.process.memory_mb("VmHWM")),
            "own_memory_bytes": round(1e6 * served.process.memory_mb("RssAnon")),
            "disk_bytes": directory_bytes(served.process.state),
        }


def measure_transport(size: int, *, tls: bool) -> dict[str, Any]:
    """Seconds of CPU a megabyte (1e6 bytes) sent and received, of the coordinator's process."""
    with serving(run_of(size, 2, bits=32), tls=tls) as served:
        body = random_body(served.layout, 1, 32, 0)
        sites = [served.site(name, body) for name in ("paris", "oslo")]
        together([site.is_asked for site in sites])
        site = sites[0]
        num_bytes = 4 * served.layout.num_elements
        sent = served.cpu_of(lambda: site.session.snapshot(0, range(num_bytes)))
        received = served.cpu_of(site.contribute)  # without the other's there is no reduction
        return {
            "tls": tls,
            "megabytes": num_bytes / 1e6,
            "cpu_ms_a_megabyte_sent": 1e3 * sent / (num_bytes / 1e6),
            "cpu_ms_a_megabyte_received": 1e3 * received / (len(body) / 1e6),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, a measurement each")
    parser.add_argument("--sizes", nargs="+", type=int, default=[124, 495], choices=MODELS)
    parser.add_argument("--sites", nargs="*", type=int, default=[2, 8], help="none: transport only")
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    measures = [
        partial(measure_rounds, size, sites)
        for size in arguments.sizes
        for sites in arguments.sites
    ]
    size = min(DENSE_SIZE, *arguments.sizes)
    measures += [partial(measure_transport, size, tls=tls) for tls in (False, True)]
    for measure in measures:
        line = json.dumps({**measure(), "load_average": os.getloadavg()[0]})
        print(line, flush=True)
        with arguments.out.open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
