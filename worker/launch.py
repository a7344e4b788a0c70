"""`loco worker --ranks N`: start the ranks of a one-node site, and end them together.

Larger sites use torchrun, Slurm or Kubernetes with `python -m worker`; the ranks are the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from loco.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED
from loco.processes import interrupt_on_sigterm, spawn, stop_all
from worker.options import Options

_POLL_SECONDS = 0.1


def launch(num_ranks: int, options: Options) -> int:
    """Run `python -m worker` once a rank; the exit code of the rank that ended the site."""
    interrupt_on_sigterm()
    command = [sys.executable, "-m", "worker", *options.arguments()]
    with tempfile.TemporaryDirectory(prefix="loco-site-") as directory:
        rendezvous = Path(directory) / "rendezvous"
        children = [
            spawn(command, _environment(rank, num_ranks, rendezvous)) for rank in range(num_ranks)
        ]
        try:
            return _wait(children)
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        finally:
            stop_all(children)


def _environment(rank: int, num_ranks: int, rendezvous: Path) -> dict[str, str]:
    """What torchrun would set; the ranks meet in a file, so that no port is held."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "LOCO_INIT_METHOD": f"file://{rendezvous}",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }


def _wait(children: list[subprocess.Popen[bytes]]) -> int:
    """0 when all have ended well, else the code of a rank that failed."""
    while True:
        codes = [child.poll() for child in children]
        failed = [code for code in codes if code]
        if failed:
            time.sleep(1.0)  # others may be about to say the same, or something clearer
            codes = [child.poll() for child in children]
            return _exit_code([code for code in codes if code])
        if all(code == 0 for code in codes):
            return EXIT_DONE
        time.sleep(_POLL_SECONDS)


def _exit_code(codes: list[int]) -> int:
    """The most telling of several: a documented one before a crash or a signal."""
    told = [code for code in codes if code > EXIT_FAILED]
    return told[0] if told else EXIT_FAILED
