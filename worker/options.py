"""What is local to a site: the flags of `loco worker`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loco.errors import ConfigError
from loco.wire.access import Access, is_loopback
from loco.wire.protocol import split_address


def check_rate(name: str, mbit: float | None) -> None:
    """ConfigError, by the `name` that the user gave, unless it is a rate in Mbit/s or None."""
    if mbit is not None and not 0 < mbit < 1e9:
        raise ConfigError(f"{name} {mbit} is not possible: use a rate above 0 in Mbit/s")


def check_metrics(address: str, *, insecure: bool) -> None:
    """ConfigError if the metrics of ranks would leave this machine and nobody has said so.

    They are plaintext also with a bundle, whose certificate cannot serve.
    """
    host, port = split_address(address)
    if not insecure and not is_loopback(host):
        raise ConfigError(
            f"--metrics {address} is reached from other machines, and a worker's metrics are in "
            f"plaintext: use 127.0.0.1:{port} (the coordinator serves what sites report), or say "
            "--insecure"
        )


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """How the ranks of the site may come and go (`--fault-tolerance torchft`)."""

    lighthouse: str | None
    """HOST:PORT of the site's lighthouse; None: `loco worker` starts one for this node."""
    local_ranks: int
    """Ranks of this node."""
    first_rank: int
    """The lowest of this node's ranks."""
    site_ranks: int
    """Ranks of the whole site: it begins when all are there."""
    interface: str
    """Address of this node in the site's private network, where ranks listen for each other."""
    rank_timeout_seconds: float
    """A rank that is silent for so long is left out."""
    heal_seconds: float
    """How long the others wait for a new rank to take their state."""
    shard_backup: bool
    """Keep what only one rank has also on the next one."""
    max_restarts: int
    """How often a rank that died is started again."""

    def arguments(self) -> list[str]:
        """The command line that gives these options; the lighthouse's address is told otherwise."""
        flags = {
            "--fault-tolerance": "torchft",
            "--ranks": self.local_ranks,
            "--first-rank": self.first_rank,
            "--site-ranks": self.site_ranks,
            "--interface": self.interface,
            "--rank-timeout": self.rank_timeout_seconds,
            "--heal-seconds": self.heal_seconds,
            "--max-restarts": self.max_restarts,
        }
        backup = ["--shard-backup"] if self.shard_backup else []
        return [str(part) for item in flags.items() for part in item] + backup


@dataclass(frozen=True, kw_only=True)
class Options:
    """Everything else comes from the coordinator at join."""

    coordinator: str
    """HOST:PORT."""
    site: str
    data: str | None
    """Corpus instead of the one that the config names for this site."""
    device: str
    """auto, cpu or cuda."""
    patience_seconds: float
    """How long to wait for a coordinator that does not answer before giving up."""
    threads: int
    """CPU threads of each rank."""
    metrics: str | None
    """HOST:PORT; rank r serves /metrics on PORT + r."""
    checkpoint: Path | None
    """Directory of the site's checkpoints, which all its ranks can reach; None: no checkpoints."""
    checkpoint_every_rounds: int
    elastic: Elastic | None = None
    """None: a static group, in which the death of a rank ends the site."""
    link_mbit: float | None
    """Rate of the site's wide-area link in Mbit/s, for the utilisation on dashboards only."""
    max_mbit: float | None = None
    """Mbit/s that the site's transfers take at most in each direction, over all its ranks."""
    bundle: Path | None = None
    """Certificate and key; None: plaintext, on loopback only unless `insecure`."""
    insecure: bool = False

    @property
    def access(self) -> Access:
        """How the ranks reach the coordinator."""
        return Access(bundle=self.bundle, insecure=self.insecure)

    def arguments(self) -> list[str]:
        """The command line that gives these options."""
        flags = {
            "--coordinator": self.coordinator,
            "--site": self.site,
            "--data": self.data,
            "--device": self.device,
            "--patience": self.patience_seconds,
            "--threads": self.threads,
            "--metrics": self.metrics,
            "--checkpoint": self.checkpoint,
            "--checkpoint-every-rounds": self.checkpoint_every_rounds,
            "--link-mbit": self.link_mbit,
            "--max-mbit": self.max_mbit,
            "--bundle": self.bundle,
        }
        given = [str(part) for item in flags.items() if item[1] is not None for part in item]
        insecure = ["--insecure"] if self.insecure else []
        return [*given, *insecure, *(self.elastic.arguments() if self.elastic else [])]
