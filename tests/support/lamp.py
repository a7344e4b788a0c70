"""A real lighthouse of torchft for a test, at an address that stays when it dies."""

from __future__ import annotations

import subprocess

from support.cluster import free_port

from worker.elastic.lighthouse import command

RANK_TIMEOUT = 1.0


class Lamp:
    """The lighthouse's process; `light` and `put_out` as often as a test wants."""

    def __init__(self, join_timeout_seconds: float = 60.0) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.process: subprocess.Popen[bytes] | None = None
        self._join_timeout_seconds = join_timeout_seconds

    def light(self) -> None:
        self.process = subprocess.Popen(
            command(self.address, RANK_TIMEOUT, self._join_timeout_seconds)
        )

    def put_out(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
