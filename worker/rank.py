"""One rank from start to exit code: what every process of a site runs."""

from __future__ import annotations

import math
import os

import torch
import torch.distributed as dist
from prometheus_client import CollectorRegistry, start_http_server

from loco.errors import ConfigError, LocoError, NonFiniteError
from loco.metrics import Catalogue, WireMetrics
from loco.processes import ignore_interrupts
from loco.wire.protocol import BLOCK_BYTES, split_address
from worker.elastic.host import Rules
from worker.elastic.outer import ReplicatedExchange
from worker.environment import number_from
from worker.exchange import Exchange
from worker.loop import Worker
from worker.options import Options
from worker.session import Session
from worker.site import Site, pick_device
from worker.stall import STALL_SECONDS

START_SECONDS = 60.0  # a site without state waits so long for all its ranks


def run_rank(options: Options) -> None:
    """Form the site with the other ranks, train until the run is finished, leave."""
    torch.set_num_threads(options.threads)
    site = _join(options)
    registry = CollectorRegistry()
    _serve_metrics(options.metrics, number_from("RANK", 0), registry)
    wire = WireMetrics(Catalogue(registry))
    session = Session(
        options.coordinator,
        options.site,
        options.patience_seconds,
        wire,
        options.access,
        bytes_per_second(options.max_mbit, site.num_shards),
        site.num_shards,
    )
    try:
        kind = Exchange if options.elastic is None else ReplicatedExchange
        Worker(options, site, session, kind).run()
        site.close()
    except (KeyboardInterrupt, NonFiniteError) as end:
        ignore_interrupts()  # Ctrl+C reaches every process of a terminal, and the launcher tells us
        if site.speaks_last() and session.caller.incarnation:
            session.leave(str(end) or "interrupted")
        raise
    except RuntimeError as error:
        if site.num_ranks == 1 or not _is_of_collective(error):
            raise
        raise LocoError(
            f"rank {site.rank} lost another rank of site {options.site!r}: {error}"
        ) from error
    finally:
        session.close()


def bytes_per_second(max_mbit: float | None, num_ranks: int) -> float | None:
    """What one rank's transfers may take; ConfigError where a block would take too long."""
    if max_mbit is None:
        return None
    rate, least = max_mbit * 1e6 / 8 / num_ranks, 2 * BLOCK_BYTES / STALL_SECONDS
    if rate < least:
        raise ConfigError(
            f"--max-mbit {max_mbit:g} is too little for {num_ranks} ranks: a transfer that takes "
            f"{STALL_SECONDS:.0f} s for a block counts as one that stands still; give at least "
            f"{math.ceil(8e-4 * least * num_ranks) / 100:g}"
        )
    return rate


def _join(options: Options) -> Site:
    """The static group of torchrun's environment, or a member of a site that may change."""
    if options.elastic is None:
        return Site.join(options.device, options.patience_seconds)
    from worker.elastic.site import ElasticSite

    return ElasticSite(
        pick_device(options.device),
        os.environ["LOCO_LIGHTHOUSE"],
        slot=number_from("RANK"),
        rules=Rules(
            target_size=options.elastic.site_ranks,
            start_seconds=START_SECONDS,
            heal_seconds=options.elastic.heal_seconds,
        ),
        interface=options.elastic.interface,
        rank_timeout_seconds=options.elastic.rank_timeout_seconds,
        patience_seconds=options.patience_seconds,
        shard_backup=options.elastic.shard_backup,
    )


def _is_of_collective(error: RuntimeError) -> bool:
    """torch has a class for NCCL's errors; gloo's are plain RuntimeErrors."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


def _serve_metrics(address: str | None, rank: int, registry: CollectorRegistry) -> None:
    if address is None:
        return
    host, port = split_address(address)
    try:
        start_http_server(port + rank, host, registry)
    except OSError as error:
        raise ConfigError(
            f"cannot serve metrics of rank {rank} on {host}:{port + rank}: "
            f"{os.strerror(error.errno or 0)}; give another --metrics"
        ) from error
