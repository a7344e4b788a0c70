"""A real run of a tiny model: coordinator and sites as processes, as a user starts them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import tomli_w
from support.live import eventually

from loco.errors import UnreachableError
from loco.status import StatusClient
from loco.wire.access import Access

SECONDS = 110.0  # for anything that imports torch while the machine is busy

TINY: dict[str, dict[str, Any]] = {
    "run": {"name": "test", "rounds": 3, "seed": 1},
    "model": {
        "dim": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 64, "seq_len": 32,
    },
    "data": {"batch": 4, "sites": {"paris": "sotu:1790-1860", "oslo": "sotu:1960-2026"}},
    "inner": {"steps": 3, "warmup_steps": 2, "lr": 3e-3, "max_local_steps": 3},
    "codec": {"k": 64, "k_start": 512, "k_ramp_rounds": 2},
    "quorum": {"min_sites": 2, "heartbeat_seconds": 0.2, "dead_after_seconds": 60.0},
    "eval": {"sequences": 8, "every_rounds": 2},
}  # fmt: skip


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Process:
    """One program; its output is kept in a file."""

    def __init__(
        self, log: Path, command: list[str], cwd: str | None = None, **environment: str
    ) -> None:
        self.log = log
        with log.open("ab") as output:
            self.popen = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                cwd=cwd,
                env={**os.environ, **environment},
                start_new_session=True,  # so that a test's own Ctrl+C does not reach it
            )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever became of the test: nothing of it goes on."""
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float = SECONDS) -> int:
        """Exit code; AssertionError with the output if it does not end."""
        try:
            return self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.output}") from None

    def says(self, text: str, seconds: float = SECONDS) -> None:
        """Wait until the output contains `text`."""
        eventually(
            lambda: text in self.output or self.popen.poll() is not None, f"says {text!r}", seconds
        )
        assert text in self.output, self.output

    def interrupt(self) -> None:
        """Ctrl+C: to the whole process group, as a terminal does."""
        os.killpg(self.popen.pid, signal.SIGINT)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.popen.pid).children(recursive=True)


def loco(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "loco", *arguments]


def run_loco(*arguments: str, seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself; no traceback may reach a user."""
    done = subprocess.run(
        loco(*arguments), capture_output=True, text=True, timeout=seconds, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


class Cluster:
    """One coordinator and any sites, in a directory of the test."""

    def __init__(self, directory: Path, **changes: dict[str, Any]) -> None:
        self.directory = directory
        self.state = directory / "state"
        self.config = directory / "run.toml"
        self.address = f"127.0.0.1:{free_port()}"
        sections = {name: {**TINY.get(name, {}), **changes.get(name, {})}
                    for name in {*TINY, *changes}}  # fmt: skip
        self.config.write_text(tomli_w.dumps(sections))
        self.bundle: Path | None = None
        """Credentials of `status`; None: plaintext."""
        self._all: list[Process] = []

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._all:
            process.__exit__()

    def start(self, name: str, command: list[str], **environment: str) -> Process:
        process = Process(self.directory / f"{name}.log", command, **environment)
        self._all.append(process)
        return process

    def coordinator(self, *arguments: str, **environment: str) -> Process:
        command = loco(
            "coordinator", str(self.config), "--state", str(self.state), "--listen", self.address,
            *arguments,
        )  # fmt: skip
        return self.start("coordinator", command, **environment)

    def site(self, name: str, *arguments: str, ranks: int = 1, log: str = "") -> Process:
        command = loco(
            "worker", "--coordinator", self.address, "--site", name, "--ranks", str(ranks),
            "--threads", "1", *arguments,
        )  # fmt: skip
        return self.start(log or name, command)

    def status(self) -> dict[str, Any]:
        client = StatusClient(self.address, Access(bundle=self.bundle))
        try:
            return client.fetch()
        finally:
            client.close()

    def reaches(self, round_: int) -> dict[str, Any]:
        """Wait until the run is at that round; the status then."""

        def there() -> dict[str, Any] | None:
            try:
                status = self.status()
            except UnreachableError:
                return None
            return status if status["round"] >= round_ else None

        found = eventually(there, f"round {round_}", SECONDS)
        assert isinstance(found, dict)
        return found

    def finish(self, *sites: Process) -> dict[str, Any]:
        """Wait for the sites, all with exit code 0; the coordinator's last status."""
        for site in sites:
            assert site.wait() == 0, site.output
            assert "Traceback" not in site.output
        return self.status()


def last_json(process: Process) -> dict[str, Any]:
    """The last line of the output as JSON."""
    document = json.loads(process.output.strip().splitlines()[-1])
    assert isinstance(document, dict)
    return document
