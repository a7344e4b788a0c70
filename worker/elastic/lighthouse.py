"""The lighthouse of one site as a process: `python -m worker.elastic.lighthouse --bind HOST:PORT`.

`loco worker --fault-tolerance torchft` starts and supervises one for a site on one node. A site on
several nodes gives it to systemd or Kubernetes, on its private network: it authenticates nobody.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import types

from loco.errors import EXIT_DONE
from loco.processes import die_with_parent
from worker.elastic.quorum import MISSING, is_installed

TICK_MS = 20
JOIN_TIMEOUT_SECONDS = 60.0


def command(
    address: str, rank_timeout_seconds: float, join_timeout_seconds: float = JOIN_TIMEOUT_SECONDS
) -> list[str]:
    """The command line that starts it."""
    module = [sys.executable, "-m", "worker.elastic.lighthouse", "--bind", address]
    timeouts = [str(rank_timeout_seconds), "--join-timeout", str(join_timeout_seconds)]
    return [*module, "--rank-timeout", *timeouts]


def main() -> int:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bind", required=True, metavar="HOST:PORT")
    parser.add_argument(
        "--rank-timeout", type=float, default=5.0, help="seconds without a heartbeat"
    )
    parser.add_argument(
        "--join-timeout",
        type=float,
        default=JOIN_TIMEOUT_SECONDS,
        help="seconds that it lets those who ask wait for one who lives and does not ask",
    )
    arguments = parser.parse_args()
    if not is_installed():
        parser.error(MISSING)
    os.environ.setdefault("RUST_LOG", "error")  # it would log every quorum
    _leave_torch_out()
    from torchft.coordination import LighthouseServer

    die_with_parent()
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        server = LighthouseServer(
            bind=arguments.bind,
            min_replicas=1,
            join_timeout_ms=round(1000 * arguments.join_timeout),
            quorum_tick_ms=TICK_MS,
            heartbeat_timeout_ms=round(1000 * arguments.rank_timeout),
        )
    except RuntimeError as error:
        parser.error(f"cannot listen on {arguments.bind}: {error}; give another --bind")
    signal.sigwait(signals)
    server.shutdown()
    return EXIT_DONE


def _leave_torch_out() -> None:
    """Make `torchft` a package whose own code does not run: it imports all of torch.

    The server needs none of it, and the whole site stands still until it is back: it listens after
    0.6 s under a load of 17, where importing torch takes more than ten, and needs 26 MB.
    """
    found = importlib.util.find_spec("torchft")
    assert found is not None
    package = types.ModuleType("torchft")
    package.__path__ = list(found.submodule_search_locations or ())
    sys.modules["torchft"] = package


if __name__ == "__main__":
    sys.exit(main())
