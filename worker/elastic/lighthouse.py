"""The lighthouse of one site as a process: `python -m worker.elastic.lighthouse --bind HOST:PORT`.

`loco worker --fault-tolerance torchft` starts and supervises one for a site on one node. A site on
several nodes gives it to systemd or Kubernetes, on its private network: it authenticates nobody.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

from loco.errors import EXIT_DONE
from loco.processes import die_with_parent
from worker.elastic.quorum import MISSING, is_installed

TICK_MS = 20
JOIN_TIMEOUT_MS = 60_000  # how long it lets those who ask wait for one who lives and does not ask


def command(address: str, rank_timeout_seconds: float) -> list[str]:
    """The command line that starts it."""
    module = [sys.executable, "-m", "worker.elastic.lighthouse"]
    return [*module, "--bind", address, "--rank-timeout", str(rank_timeout_seconds)]


def main() -> int:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bind", required=True, metavar="HOST:PORT")
    parser.add_argument(
        "--rank-timeout", type=float, default=5.0, help="seconds without a heartbeat"
    )
    arguments = parser.parse_args()
    if not is_installed():
        parser.error(MISSING)
    os.environ.setdefault("RUST_LOG", "error")  # it would log every quorum
    from torchft.coordination import LighthouseServer

    die_with_parent()
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    server = LighthouseServer(
        bind=arguments.bind,
        min_replicas=1,
        join_timeout_ms=JOIN_TIMEOUT_MS,
        quorum_tick_ms=TICK_MS,
        heartbeat_timeout_ms=round(1000 * arguments.rank_timeout),
    )
    signal.sigwait(signals)
    server.shutdown()
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
