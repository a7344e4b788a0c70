"""The processes of a run under test: a coordinator, sites behind proxies, and a way to ask."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc
import psutil
import tomli_w

from coordinator.events import Event
from coordinator.journal import Journal
from loco.wire.protocol import PROTOCOL_VERSION
from loco.wire.v1 import coordinator_pb2 as pb
from loco.wire.v1 import coordinator_pb2_grpc as pb_grpc

from .proxy import Proxy

T = TypeVar("T")
Raw = dict[str, dict[str, Any]]

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 90.0
_POLL_SECONDS = 0.02
_ENVIRONMENT = {
    "LOCO_LOG": "json",
    "NUMBA_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}


def until(condition: Callable[[], T], what: str, seconds: float = PATIENCE_SECONDS) -> T:
    """Poll until `condition` gives something true; TimeoutError names `what`."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"after {seconds:.0f} s still not: {what}")
        time.sleep(_POLL_SECONDS)
    return value


class Process:
    """One program, restarted as often as wanted; its log goes on in one file."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None

    def spawn(self, command: list[str], **environment: str) -> None:
        assert self.process is None or self.process.poll() is not None
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **_ENVIRONMENT, **environment},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def ended(self) -> int | None:
        """The exit code, if it has ended by itself."""
        return None if self.process is None else self.process.poll()

    def signal(self, number: int) -> None:
        """To the process and all its children."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def ranks(self) -> list[psutil.Process]:
        """The processes of the ranks: the children of the launcher, or the process itself."""
        assert self.process is not None
        own = psutil.Process(self.process.pid)
        return own.children() or [own]

    def wait(self, seconds: float = PATIENCE_SECONDS) -> int:
        """Its exit code."""
        assert self.process is not None
        return self.process.wait(seconds)

    def kill(self) -> None:
        if self.process is not None:
            Process.signal(self, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def lines(self) -> Iterator[dict[str, Any]]:
        """The JSON lines of the log."""
        if not self.log.exists():
            return
        for line in self.log.read_text(errors="replace").splitlines():
            if line.startswith("{") and line.endswith("}"):  # a killed process may tear its last
                yield json.loads(line)

    def tail(self, count: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])


class Coordinator(Process):
    """`loco coordinator` on a port that stays the same over restarts."""

    def __init__(self, directory: Path, raw: Raw) -> None:
        super().__init__(directory / "coordinator.log")
        self.state = directory / "disk" / "state"  # `disk` may be a small file system
        self.config = directory / "run.toml"
        self.config.write_text(tomli_w.dumps(raw), encoding="utf-8")
        self.port = free_port()
        self._channel = grpc.insecure_channel(
            f"127.0.0.1:{self.port}",
            options=(
                ("grpc.initial_reconnect_backoff_ms", 50),
                ("grpc.min_reconnect_backoff_ms", 50),
                ("grpc.max_reconnect_backoff_ms", 50),
            ),
        )
        self.stub = pb_grpc.CoordinatorServiceStub(self._channel)

    def command(self, *prefix: str, listen: str | None = None) -> list[str]:
        listen = listen or f"127.0.0.1:{self.port}"
        program = [*prefix, sys.executable, "-m", "tests.chaos.clocked"]
        where = ["--state", str(self.state), "--listen", listen]
        return [*program, "coordinator", str(self.config), *where]

    def start(self, fail_point: str = "", prefix: tuple[str, ...] = ()) -> float:
        """Start it and wait until it answers; seconds that took.

        With a fail point it may be dead again before it could be asked.
        """
        began = time.monotonic()
        self.spawn(self.command(*prefix), LOCO_FAIL_POINT=fail_point)
        self.until(lambda: self.status() or (fail_point and not self.alive), "it answers")
        return time.monotonic() - began

    def status(self) -> dict[str, Any] | None:
        """The status document; None while it does not answer."""
        try:
            request = pb.StatusRequest(protocol_version=PROTOCOL_VERSION)
            answer = self.stub.Status(request, timeout=2.0)
        except grpc.RpcError:
            return None
        document: dict[str, Any] = json.loads(answer.status_json)
        return document

    def round(self) -> int:
        """The run's round; -1 while nobody answers."""
        status = self.status()
        return -1 if status is None else int(status["round"])

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """As `until`, but a coordinator that has died is said at once."""

        def check() -> Any:
            value = condition()
            if not value and not self.alive:
                raise RuntimeError(
                    f"the coordinator died while waiting until {what}:\n{self.tail()}"
                )
            return value

        return until(check, what)

    def control(self, verb: str, **fields: str) -> str:
        """An operator's order, as `loco control` sends it."""
        number = pb.ControlVerb.Value(f"CONTROL_VERB_{verb.upper()}")
        request = pb.ControlRequest(protocol_version=PROTOCOL_VERSION, verb=number, **fields)
        return str(self.stub.Control(request, timeout=10.0).message)

    def stop(self) -> None:
        """SIGTERM, as an operator does."""
        if self.alive:
            self.signal(signal.SIGTERM)
            self.wait()

    def events(self) -> list[Event]:
        """The journal from its beginning, read from a copy."""
        with contextlib.closing(Journal(self._copy_of_journal())) as journal:
            return [event for _, event in journal.replay(after=0)]

    def _copy_of_journal(self) -> Path:
        copy = self.log.with_name("journal-copy")
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        for file in self.state.glob("journal.sqlite*"):
            if not file.name.endswith("-shm"):
                shutil.copy(file, copy)
        return copy / "journal.sqlite"

    def close(self) -> None:
        self._channel.close()


class SiteProcess(Process):
    """`loco worker` of one site, behind a proxy of its own."""

    def __init__(self, directory: Path, name: str, ranks: int, coordinator: Coordinator) -> None:
        super().__init__(directory / f"{name}.log")
        self.name = name
        self.num_ranks = ranks
        self.proxy = Proxy(("127.0.0.1", coordinator.port))
        self.checkpoint = directory / f"checkpoint-{name}"

    def start(self, *, ranks: int | None = None) -> None:
        """Every round leaves a checkpoint, from which a restarted site goes on."""
        self.spawn(self.command(ranks=ranks or self.num_ranks))

    def command(self, *more: str, ranks: int) -> list[str]:
        """Of `loco worker` with so many ranks."""
        options = {
            "--coordinator": self.proxy.address,
            "--site": self.name,
            "--ranks": str(ranks),
            "--threads": "1",
            "--patience": "600",
            "--checkpoint": str(self.checkpoint),
            "--checkpoint-every-rounds": "1",
            "--device": "cpu",
        }
        flags = [part for item in options.items() for part in item]
        return [sys.executable, "-m", "loco", "worker", *flags, *more]

    @property
    def has_checkpoint(self) -> bool:
        return any(self.checkpoint.glob("round-????????"))

    def close(self) -> None:
        self.kill()
        self.proxy.close()


Sites = dict[str, tuple[type[SiteProcess], int]]  # by name: how it runs, and its ranks


class World:
    """A whole run: a coordinator and its sites, under `directory`."""

    def __init__(self, directory: Path, raw: Raw, sites: Sites) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.coordinator = Coordinator(directory, raw)
        self.sites = {
            name: kind(directory, name, ranks, self.coordinator)
            for name, (kind, ranks) in sites.items()
        }

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        for site in self.sites.values():
            site.close()
        self.coordinator.kill()
        self.coordinator.close()

    def start(self) -> None:
        """Start everything; wait for the first committed round and every site's checkpoint of it.

        A site that dies before its first one comes back without its inner optimizer's state.
        """
        self.coordinator.start()
        for site in self.sites.values():
            site.start()
        self.reach(1)
        for site in self.sites.values():
            until(lambda site=site: site.has_checkpoint, f"{site.name} has a checkpoint")

    def reach(self, round_: int) -> None:
        """Wait until the run is at this round; a process that died is said at once."""
        self.coordinator.until(
            lambda: self._check_sites() or self.coordinator.round() >= round_, f"round {round_}"
        )

    def progress(self, rounds: int = 1) -> float:
        """Wait for so many more commits; seconds that took."""
        began = time.monotonic()
        now = self.coordinator.until(lambda: self.coordinator.round() + 1, "the round is known") - 1
        self.reach(now + rounds)
        return time.monotonic() - began

    def coordinator_dies(self) -> int:
        """Wait until it has ended; its exit code."""
        until(lambda: self._check_sites() or not self.coordinator.alive, "the coordinator dies")
        return self.coordinator.wait()

    def _check_sites(self) -> None:
        for site in self.sites.values():
            if (code := site.ended()) is not None:
                raise RuntimeError(f"site {site.name} ended with {code}:\n{site.tail()}")

    def drain(self) -> dict[str, int]:
        """Let the open round end, send all sites home, stop; the sites' exit codes."""
        self.coordinator.control("drain")
        codes = {name: site.wait() for name, site in self.sites.items()}
        self.coordinator.stop()
        return codes


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
