"""Start the processes of a demo, follow the run, collect the numbers, stop everything."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tomli_w

from loco.config import Config
from loco.demo.config import DemoOptions, demo_config
from loco.demo.report import ProgressView, make_result, print_result
from loco.errors import EXIT_FAILED, LocoError, UnreachableError
from loco.processes import interrupt_on_sigterm, spawn, stop_all
from loco.status import Status, StatusClient

_POLL_SECONDS = 1.0
_START_SECONDS = 120.0


def run_demo(options: DemoOptions, *, as_json: bool) -> None:
    """Train, and print what was reached; raises LocoError with the log's end if a process fails."""
    interrupt_on_sigterm()
    config, names = demo_config(options)
    # Data-parallel training has one site, with everyone in it.
    ranks = options.ranks * (options.sites if options.algorithm == "ddp" else 1)
    started = time.monotonic()
    status = run_processes(config, names, ranks, ProgressView(config, quiet=as_json))
    result = make_result(config, options, status, time.monotonic() - started)
    print_result(result, as_json=as_json)


def run_processes(config: Config, names: list[str], ranks: int, progress: ProgressView) -> Status:
    """A coordinator and a site of `ranks` ranks for each name, on this machine, until all ended.

    Returns:
        The coordinator's last status document.

    Raises:
        LocoError: a process failed; the end of its log is in the message.
    """
    with tempfile.TemporaryDirectory(prefix="loco-demo-") as directory:
        demo = _Demo(Path(directory))
        try:
            demo.start_coordinator(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)))
            for name in names:
                demo.start_site(name, ranks)
            return demo.follow(progress)
        finally:
            demo.stop()


class _Demo:
    """The processes of one demo; their logs lie in its directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._address = ""

    def start_coordinator(self, config: str) -> None:
        path = self._directory / "run.toml"
        path.write_text(config, encoding="utf-8")
        state = self._directory / "state"
        listen = ["--listen", "127.0.0.1:0"]
        self._spawn("coordinator", ["coordinator", str(path), "--state", str(state), *listen])
        self._address = self._wait_for_address(state / "address")

    def start_site(self, name: str, ranks: int) -> None:
        where = ["--coordinator", self._address, "--site", name]
        self._spawn(name, ["worker", *where, "--ranks", str(ranks), "--threads", "1"])

    def follow(self, progress: ProgressView) -> Status:
        """Show progress until every site has ended; the last status."""
        client = StatusClient(self._address)
        with progress:
            while not self._all_sites_done():
                time.sleep(_POLL_SECONDS)
                self._check_alive()
                with contextlib.suppress(UnreachableError):  # a busy machine: ask again
                    progress.show(client.fetch())
        status = client.fetch()
        client.close()
        return status

    def stop(self) -> None:
        stop_all(self._processes.values())

    def _spawn(self, name: str, arguments: list[str]) -> None:
        command = [sys.executable, "-m", "loco", *arguments]
        with (self._directory / f"{name}.log").open("wb") as log:
            self._processes[name] = spawn(command, stderr=log)

    def _wait_for_address(self, path: Path) -> str:
        until = time.monotonic() + _START_SECONDS
        while not path.exists():
            self._check_alive()
            if time.monotonic() > until:
                raise UnreachableError(
                    f"the coordinator did not start within {_START_SECONDS:.0f} s: {self._log()}"
                )
            time.sleep(0.1)
        return path.read_text(encoding="utf-8")

    def _all_sites_done(self) -> bool:
        return all(
            process.poll() == 0
            for name, process in self._processes.items()
            if name != "coordinator"
        )

    def _check_alive(self) -> None:
        for name, process in self._processes.items():
            code = process.poll()
            if code or (code == 0 and name == "coordinator"):
                error = LocoError(f"{name} ended with exit code {code}:\n{self._log(name)}")
                error.exit_code = code or EXIT_FAILED
                raise error

    def _log(self, name: str = "coordinator") -> str:
        lines = (self._directory / f"{name}.log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-10:])
