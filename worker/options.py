"""What is local to a site: the flags of `loco worker`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loco.wire.access import Access


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
    link_mbit: float | None
    """Rate of the site's wide-area link in Mbit/s, for the utilisation on dashboards only."""
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
            "--bundle": self.bundle,
        }
        given = [str(part) for item in flags.items() if item[1] is not None for part in item]
        return [*given, "--insecure"] if self.insecure else given
