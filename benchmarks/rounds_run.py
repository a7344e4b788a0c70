"""A real coordinator process and sites that cost nothing, for benchmarks.rounds and .scaling_run.

The sites speak through `worker.session` and hold no theta: they believe each digest that the
coordinator announces, fetch the update and forget it, and send the same shard in every round.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import tomli_w
from prometheus_client import CollectorRegistry

from coordinator.journal import Journal
from loco import codec
from loco.config import Config, config_from_json
from loco.digest import bytes_digest
from loco.errors import RefusedError
from loco.layout import CHUNK, Layout, cells
from loco.metrics import Catalogue, WireMetrics
from loco.wire.access import Access, Link
from loco.wire.blocks import make_block
from loco.wire.protocol import BLOCK_BYTES, CHANNEL_OPTIONS, PROTOCOL_VERSION
from loco.wire.v1 import coordinator_pb2 as pb
from loco.wire.v1 import coordinator_pb2_grpc as pb_grpc
from worker.session import Session

PATIENCE_SECONDS = 120.0
START_SECONDS = 900.0  # to make the initial parameters of the largest model on a busy machine
_POLL_SECONDS = 0.002


class CoordinatorProcess:
    """`loco coordinator` on one state directory and port; started as often as wanted.

    With `bundle`, that of a coordinator, it speaks TLS, and `access` is with what it is asked.
    """

    def __init__(
        self,
        directory: Path,
        raw: dict[str, dict[str, Any]],
        bundle: Path | None = None,
        access: Access | None = None,
    ) -> None:
        self._bundle = bundle
        self._access = access or Access()
        self.state = directory / "state"
        self.log = directory / "coordinator.log"
        self._config = directory / "run.toml"
        directory.mkdir(parents=True, exist_ok=True)
        self._config.write_text(tomli_w.dumps(raw))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> float:
        """Start it; seconds from the start of the process to its first answer."""
        command = [sys.executable, "-m", "loco", "coordinator", str(self._config)]
        flags = ["--state", str(self.state), "--listen", self.address]
        if self._bundle is not None:
            flags += ["--bundle", str(self._bundle)]
        began = time.monotonic()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen([*command, *flags], stdout=log, stderr=log)
        self._wait_for_answer()
        return time.monotonic() - began

    def _wait_for_answer(self) -> None:
        """Connect as soon as somebody listens: gRPC's own pauses would count as well."""
        until = time.monotonic() + START_SECONDS
        while True:
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the coordinator does not answer:\n{self.log.read_text()}")
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
                break
            except OSError:
                time.sleep(_POLL_SECONDS)
        link = Link(self.address, self._access)
        request = pb.GetRunRequest(protocol_version=PROTOCOL_VERSION)
        link.stub.GetRun(request, timeout=PATIENCE_SECONDS, wait_for_ready=True)
        link.close()

    def stop(self) -> None:
        """SIGTERM, and wait."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, as an accident does."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
            self._process.wait(PATIENCE_SECONDS)

    def memory_mb(self, field: str) -> float:
        """VmHWM (peak) or VmRSS (now) of /proc, in MB of 1e6 bytes."""
        assert self._process is not None
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith(f"{field}:"))
        return int(line.split()[1]) * 1024 / 1e6

    def cpu_seconds(self) -> float:
        """User and system time of the process so far."""
        assert self._process is not None
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class LightSite:
    """One site of one rank that contributes `body` to every round that asks it."""

    def __init__(self, address: str, name: str, body: bytes, access: Access | None = None) -> None:
        self.name = name
        wire = WireMetrics(Catalogue(CollectorRegistry()))
        self.session = Session(address, name, PATIENCE_SECONDS, wire, access)
        self.body = body
        self.pause = 0.0
        """Seconds before each contribution, in the place of inner steps."""
        self.pushed_at: dict[int, float] = {}
        self.updated_at: dict[int, float] = {}
        """By round: when its contribution began to be sent, and when its update was here."""
        self.update_bytes = 0
        """Of the update that came last."""
        self.round = 0
        self._digest = ""
        self.refused = 0
        self.broken = 0

    def join(self, layout: Layout) -> None:
        """Enter, and believe to hold the newest snapshot."""
        run = self.session.get_run()
        joined = self.session.join(run, layout, 1, None)
        self.session.caller = pb.Caller(
            run_id=run.run_id, site=self.name, incarnation=joined.incarnation
        )
        self.round, self._digest = joined.snapshot_round, joined.snapshot_digest

    def run(self, rounds: int, fault: Callable[[int], str] = lambda _round: "") -> None:
        """Until the run is at round `rounds`; `fault` says what goes wrong in a round, if any."""
        while self.round < rounds:
            answer = self.session.next_directive(self.round, self._digest)
            if answer.directive == pb.DIRECTIVE_TRAIN:
                self._contribute(fault(self.round))
            elif answer.directive == pb.DIRECTIVE_UPDATE:
                self.update_bytes = answer.update_bytes
                if not answer.HasField("update"):
                    self.session.pull(self.round, range(answer.update_bytes))
                self.updated_at[self.round] = time.monotonic()
                self.round, self._digest = self.round + 1, answer.theta_digest
                if answer.HasField("next") and self.round < rounds:
                    self._contribute(fault(self.round))
            else:
                raise RuntimeError(f"{self.name} at round {self.round} is told {answer}")

    def is_asked(self) -> None:
        """Wait until the round in progress wants a contribution; other sites must ask, too."""
        answer = self.session.next_directive(self.round, self._digest)
        if answer.directive != pb.DIRECTIVE_TRAIN:
            raise RuntimeError(f"{self.name} at round {self.round} is told {answer}")

    def contribute(self) -> None:
        """After `is_asked`; returns when the contribution is acknowledged."""
        self._contribute("")

    def _contribute(self, fault: str) -> None:
        if fault == "malformed":
            try:
                self.session.push(self._header(), self.body[:-1])
            except RefusedError as refused:
                if refused.reason != "payload":
                    raise
                self.refused += 1
        elif fault == "broken off":
            self._break_off()
        else:
            time.sleep(self.pause)
            self.pushed_at[self.round] = time.monotonic()
            self.session.push(self._header(), self.body)

    def _header(self) -> pb.PushHeader:
        return pb.PushHeader(
            round=self.round,
            num_shards=1,
            tokens=100,
            inner_steps=1,
            data_cursor=self.round + 1,
            theta_digest=self._digest,
        )

    def _break_off(self) -> None:
        """Send half of the shard and vanish; the round closes without it."""
        header = self._header()
        header.caller.CopyFrom(self.session.caller)
        header.size_bytes, header.digest = len(self.body), bytes_digest(self.body)
        sent = threading.Event()

        def messages() -> Iterator[pb.PushRequest]:
            yield pb.PushRequest(header=header)
            half = self.body[: len(self.body) // 2]
            for start in range(0, len(half), BLOCK_BYTES):
                yield pb.PushRequest(block=make_block(half[start : start + BLOCK_BYTES]))
            sent.set()
            time.sleep(0.1)

        with grpc.insecure_channel(self.session.address, options=CHANNEL_OPTIONS) as channel:
            call = pb_grpc.CoordinatorServiceStub(channel).Push.future(messages())
            sent.wait(10)
            call.cancel()
        self.broken += 1
        while True:  # asked again for the same contribution, until the round has gone on
            answer = self.session.next_directive(self.round, self._digest)
            if answer.directive != pb.DIRECTIVE_TRAIN:
                self.round, self._digest = self.round + 1, answer.theta_digest
                return
            time.sleep(0.05)


def read_run(coordinator: CoordinatorProcess) -> tuple[Config, Layout]:
    """Config and layout, from a state directory that a coordinator may be using."""
    journal = Journal(coordinator.state / "journal.sqlite")
    facts = journal.facts()
    journal.close()
    return config_from_json(facts["config"]), Layout.from_json(facts["layout"])


def together(works: list[Callable[[], None]]) -> None:
    """Each in a thread of its own; raises the first error."""
    errors: list[BaseException] = []

    def guard(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guard, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def random_body(layout: Layout, k: int, bits: int, seed: int) -> bytes:
    """A contribution of random values, as large as a real one; bits = 32 is dense."""
    rng = np.random.default_rng(seed)
    parts = []
    for cell in cells(range(layout.num_chunks)):
        values = 1e-3 * rng.standard_normal(len(cell) * CHUNK, dtype=np.float32)
        encoded = codec.encode_dense(values) if bits == 32 else codec.encode(values, k=k, bits=bits)
        parts.append(encoded.payload)
    return b"".join(parts)


def zero_body(layout: Layout, config: Config) -> bytes:
    """A contribution without a value: nothing but headers."""
    return b"".join(
        codec.encode(
            np.zeros(len(cell) * CHUNK, np.float32), k=config.codec.k, bits=config.codec.bits
        ).payload
        for cell in cells(range(layout.num_chunks))
    )
