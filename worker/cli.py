"""`loco worker`, which `python -m worker` under torchrun equals."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loco.commands import Bundle, Insecure
from loco.errors import ConfigError
from loco.log import start_logging
from loco.processes import end_with, interrupt_on_sigterm
from worker.settings import use_settings

if TYPE_CHECKING:
    from worker.options import Options

log = logging.getLogger("loco.worker")

CRASHES_TORCHFT = "TORCHFT_USE_OTEL"  # torchft 0.2.0 with the current opentelemetry


# The flags of `loco worker`, in the order of its help.
Coordinator = Annotated[str, typer.Option(metavar="HOST:PORT", help="The coordinator.")]
SiteName = Annotated[str, typer.Option(help="Name of this site, for example paris.")]
Ranks = Annotated[
    int | None,
    typer.Option(help="Ranks to start here; under torchrun its world is used. Default 1."),
]
Data = Annotated[
    str | None, typer.Option(help="Corpus to train on, not the config's; validation stays.")
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="CPU threads a rank. Default: usable CPUs over local ranks."),
]
Patience = Annotated[
    float, typer.Option(min=0.0, help="Seconds to wait for a coordinator that is away.")
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(help="Directory of this site's checkpoints; it comes back from the newest."),
]
CheckpointEveryRounds = Annotated[int, typer.Option(min=1)]
Metrics = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Rank r serves /metrics on PORT + r.")
]
LinkMbit = Annotated[
    float | None,
    typer.Option(help="Rate of the wide-area link in Mbit/s, for dashboards; else measured."),
]
MaxMbit = Annotated[
    float | None,
    typer.Option(help="Mbit/s that the site's transfers take at most, each way."),
]
FaultTolerance = Annotated[
    str,
    typer.Option(help="torchft: ranks may die and come back; none: a dead rank ends the site."),
]
ShardBackup = Annotated[
    bool, typer.Option(help="torchft: keep what only one rank has also on the next one.")
]
Lighthouse = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="torchft: the site's lighthouse; else started."),
]
SiteRanks = Annotated[
    int | None,
    typer.Option(min=1, help="torchft: ranks on all nodes of the site. Default --ranks."),
]
FirstRank = Annotated[int, typer.Option(min=0, help="torchft: the lowest of this node's ranks.")]
Interface = Annotated[
    str, typer.Option(help="torchft: this node's address in the site's private network.")
]
RankTimeout = Annotated[
    float, typer.Option(min=0.5, help="torchft: seconds until a silent rank is left out.")
]
HealSeconds = Annotated[
    float, typer.Option(min=1.0, help="torchft: seconds a new rank has to take the state.")
]
MaxRestarts = Annotated[
    int, typer.Option(min=0, help="torchft: how often a rank that died is started again.")
]
SettingsFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        callback=use_settings,
        is_eager=True,
        expose_value=False,
        help="TOML file whose table [site] gives these options; a flag wins over it.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command of this package to `loco`."""
    app.command()(worker)


def worker(
    coordinator: Coordinator,
    site: SiteName,
    ranks: Ranks = None,
    data: Data = None,
    device: Device = "auto",
    threads: Threads = None,
    patience: Patience = 3600.0,
    checkpoint: Checkpoint = None,
    checkpoint_every_rounds: CheckpointEveryRounds = 10,
    metrics: Metrics = None,
    link_mbit: LinkMbit = None,
    max_mbit: MaxMbit = None,
    bundle: Bundle = None,
    insecure: Insecure = False,
    fault_tolerance: FaultTolerance = "none",
    shard_backup: ShardBackup = False,
    lighthouse: Lighthouse = None,
    site_ranks: SiteRanks = None,
    first_rank: FirstRank = 0,
    interface: Interface = "127.0.0.1",
    rank_timeout: RankTimeout = 5.0,
    heal_seconds: HealSeconds = 120.0,
    max_restarts: MaxRestarts = 10,
    settings: SettingsFile = None,  # noqa: ARG001  # its callback has used it
) -> None:
    """Join a run as one site and train until it is finished.

    Exit codes: 0 done, 2 bad usage or config, 3 refused by the coordinator, 4 coordinator
    unreachable, 5 training failed (non-finite), 130 interrupted.
    """
    # They import pydantic and grpc: too slow for `loco --help`.
    from loco.config import check_site_name
    from loco.cpus import usable_cpus
    from loco.wire.protocol import split_address
    from worker.environment import number_from
    from worker.options import Elastic, Options, check_metrics, check_rate

    elastic = None
    here = ranks or 1
    everywhere = site_ranks or here
    if first_rank + here > everywhere:
        raise ConfigError(
            f"--first-rank {first_rank} with --ranks {here} is not possible: the site has "
            f"{everywhere} ranks (--site-ranks), 0 to {everywhere - 1}"
        )
    if _tolerates_faults(fault_tolerance, alone=here == everywhere):
        elastic = Elastic(
            lighthouse=lighthouse,
            local_ranks=here,
            first_rank=first_rank,
            site_ranks=everywhere,
            interface=interface,
            rank_timeout_seconds=rank_timeout,
            heal_seconds=heal_seconds,
            shard_backup=shard_backup,
            max_restarts=max_restarts,
        )
    world = number_from("WORLD_SIZE", 0) if elastic is None else 0
    if ranks is not None and (ranks < 1 or (world and ranks != world)):
        allowed = f"the {world} ranks of this torchrun job" if world else "at least 1"
        raise ConfigError(f"--ranks {ranks} is not possible: use {allowed}")
    check_rate("--link-mbit", link_mbit)
    check_rate("--max-mbit", max_mbit)
    num_local = number_from("LOCAL_WORLD_SIZE", ranks or 1)
    if metrics is not None:
        check_metrics(metrics, insecure=insecure)
    options = Options(
        coordinator=coordinator,
        site=check_site_name(site),
        data=data,
        device=device,
        patience_seconds=patience,
        threads=threads or max(1, usable_cpus() // max(1, num_local)),
        metrics=metrics,
        checkpoint=checkpoint,
        checkpoint_every_rounds=checkpoint_every_rounds,
        elastic=elastic,
        link_mbit=link_mbit,
        max_mbit=max_mbit,
        bundle=bundle,
        insecure=insecure,
    )
    if lighthouse is not None:
        split_address(lighthouse)
    _start(options, num_local=1 if world else num_local)


def _start(options: Options, *, num_local: int) -> None:
    """Be a rank, or start the ranks of this node and wait for them."""
    options.access.check(options.coordinator, site=options.site)
    if options.elastic is not None and "LOCO_LIGHTHOUSE" not in os.environ:
        from worker.elastic.supervisor import supervise

        here, everywhere = options.elastic.local_ranks, options.elastic.site_ranks
        if here < everywhere and options.elastic.lighthouse is None:
            raise ConfigError(
                f"--site-ranks {everywhere} is more than --ranks {here}: the nodes of a site need "
                "--lighthouse HOST:PORT, the same for all, see docs/torchft.md"
            )
        start_logging(options.site)
        sys.exit(supervise(options))
    if options.elastic is None and num_local > 1:
        from worker.launch import launch

        sys.exit(launch(num_local, options))
    interrupt_on_sigterm()
    start_logging(f"{options.site}/{os.environ.get('RANK', '0')}")

    from worker.rank import run_rank

    end_with(lambda: run_rank(options))


def _tolerates_faults(choice: str, *, alone: bool) -> bool:
    """Whether ranks may die; without torchft a site runs on a static group and says so once.

    Args:
        alone: all ranks of the site are of this node: others would each be the whole site.
    """
    if choice not in ("none", "torchft"):
        raise ConfigError(f"--fault-tolerance {choice!r} is not known: use torchft or none")
    if choice == "none":
        return False
    from worker.environment import number_from

    supervised = "LOCO_LIGHTHOUSE" in os.environ
    if "TORCHELASTIC_RUN_ID" in os.environ or (not supervised and number_from("WORLD_SIZE", 1) > 1):
        raise ConfigError(
            "--fault-tolerance torchft does not go with torchrun or another launcher of ranks "
            "(WORLD_SIZE is set), which end all ranks when one dies: use `loco worker --ranks N` "
            "on every node, see docs/torchft.md"
        )
    from worker.elastic.quorum import MISSING, is_installed

    if os.environ.pop(CRASHES_TORCHFT, None) is not None:
        start_logging("worker")
        log.warning("%s is set and left out: torchft fails at its import with it", CRASHES_TORCHFT)
    if not is_installed() and not alone:
        raise ConfigError(
            f"{MISSING}: without it a site of several nodes needs torchrun, and no "
            "--fault-tolerance, --site-ranks and --first-rank"
        )
    if not is_installed():
        start_logging("worker")
        log.warning("%s: this site runs on a static group, a dead rank ends it", MISSING)
        return False
    return True
