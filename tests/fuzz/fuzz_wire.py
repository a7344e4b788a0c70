"""Fuzz the coordinator's gRPC surface with a valid certificate, while good sites train.

    python -m tests.fuzz.fuzz_wire --calls 1000000 --seed 1 --json

Site `mallory` has joined and calls every method with random bytes, with right messages whose bytes
were changed, and with right messages of which a field was changed; uploads get as far as the
decoder, with digests that fit. Now and then it speaks random bytes behind the TLS handshake. Two
good sites go through rounds meanwhile. The coordinator must stay alive, its memory flat, its
answers documented ones, the good sites' theta right, and its state sound (`loco state check`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import loco  # noqa: F401 - before gRPC, which it configures

sys.path.insert(0, str(Path(__file__).parents[1]))

import grpc.aio
import psutil
import tomli_w
from chaos.numpy_site import NumpySite
from fuzz.mutate import Mutator
from grpc._cython import cygrpc
from support.certs import Certs
from support.runs import LAYOUT, config_of, create_store

from coordinator.check import check_state
from coordinator.gate import RULES
from loco.certs.bundle import read_bundle
from loco.wire.access import Access
from loco.wire.protocol import CHANNEL_OPTIONS, REASON_KEY

GOOD = ("oslo", "paris")
AT_ONCE = 64
CALL_SECONDS = 2.0
REFRESH_CALLS = 250  # after so many mallory joins again and learns the round
RAW_EVERY = 2000  # calls between two connections that speak no gRPC
ROUND_SECONDS = 1.0
# What a caller may be told. UNKNOWN and INTERNAL would be an exception of ours.
# NOT_FOUND is the health service's, for a service that it does not know.
DOCUMENTED = {
    "OK", "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "CANCELLED", "NOT_FOUND",
    "ENDED_EARLY",
}  # fmt: skip
# Most calls go on as the same member; a few begin anew.
WEIGHTS = {"Join": 0.02, "Leave": 0.02, "Push": 3.0}
CONFIG: dict[str, dict[str, Any]] = {
    "run": {"rounds": 1_000_000},
    "quorum": {
        "min_sites": 2, "grace_seconds": 0.3, "heartbeat_seconds": 0.5, "quarantine_after": 10**9,
    },
    "limits": {"requests_per_second": 1e6, "messages_per_second": 1e6, "calls_at_once": 10_000},
}  # fmt: skip


@dataclass
class Outcome:
    """What came of it."""

    calls: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    """Of mallory, by status or reason."""
    undocumented: list[dict[str, str]] = field(default_factory=list)
    """The first few calls with an answer that nobody should get."""
    rss_mib: list[tuple[int, float]] = field(default_factory=list)
    """Calls so far, and the coordinator's resident memory then."""
    good_rounds: int = 0
    faults: list[str] = field(default_factory=list)
    """Of good sites, coordinator and state; empty when all is well."""
    seconds: float = 0.0


class SlowSite(NumpySite):
    """Takes its time to contribute, so that rounds are open most of the time."""

    def contribute(self, k: int) -> None:
        time.sleep(ROUND_SECONDS)
        super().contribute(k)


class GoodSite:
    """A site that goes through rounds until `stop`; its theta is checked in each."""

    def __init__(self, address: str, name: str, certs: Certs) -> None:
        access = Access(bundle=certs.bundle(name))
        self.site = SlowSite(address, name, LAYOUT, access=access)
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.site.join()
            while not self._stop.is_set():
                self.site.follow()
        except BaseException as error:
            self.error = error
        finally:
            self.site.close()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60.0)


class Mallory:
    """The one with a valid certificate and no good in mind."""

    def __init__(self, address: str, bundle: Path, seed: int) -> None:
        self._address = address
        self._bundle = bundle
        self._random = random.Random(seed)
        self._mutator = Mutator(self._random, "mallory", GOOD)

    async def attack(self, calls: int, until: float, outcome: Outcome, sample: Any) -> None:
        """Make so many calls, AT_ONCE at a time, but not beyond a time (monotonic)."""
        bundle = read_bundle(self._bundle)
        credentials = grpc.ssl_channel_credentials(
            bundle.authority_pem, bundle.key_pem, bundle.certificate_pem
        )
        every = max(1, calls // 20)
        async with grpc.aio.secure_channel(
            self._address, credentials, options=CHANNEL_OPTIONS
        ) as channel:
            methods = {name: channel.stream_stream(name) for name in RULES}
            while outcome.calls < calls and time.monotonic() < until:
                await self._refresh(channel)
                batch = min(REFRESH_CALLS, calls - outcome.calls)
                todo = iter(range(batch))
                await asyncio.gather(
                    *(self._caller(methods, todo, outcome) for _ in range(AT_ONCE))
                )
                if outcome.calls % RAW_EVERY < batch:
                    await asyncio.to_thread(self._speak_no_grpc)
                if outcome.calls // every != (outcome.calls - batch) // every:
                    sample(outcome)

    async def _caller(self, methods: dict[str, Any], todo: Iterator[int], outcome: Outcome) -> None:
        names = list(methods)
        weights = [WEIGHTS.get(name.rpartition("/")[2], 1.0) for name in names]
        for _ in todo:
            (name,) = self._random.choices(names, weights)
            messages = self._mutator.messages(name)
            answer, detail = await self._call(methods[name], messages)
            outcome.calls += 1
            outcome.answers[answer] += 1
            documented = answer in DOCUMENTED or answer.startswith("refused ")
            if not documented and len(outcome.undocumented) < 20:
                sent = [message[:400].hex() for message in messages]
                outcome.undocumented.append(
                    {"method": name, "answer": answer, "detail": detail, "sent": " ".join(sent)}
                )

    async def _call(self, method: Any, messages: list[bytes]) -> tuple[str, str]:
        call = method(timeout=CALL_SECONDS)
        num_answers = 0
        # gRPC's own error for a write to a call that has ended is in a private module.
        ended = (asyncio.InvalidStateError, grpc.aio.AioRpcError, cygrpc.InternalError)
        with contextlib.suppress(*ended):
            for message in messages:  # it may be refused before all of them are sent
                await call.write(message)
            await call.done_writing()
        try:
            while await call.read() is not grpc.aio.EOF:
                num_answers += 1
                if num_answers > 8:  # a watch has no end
                    call.cancel()
                    return "OK", ""
        except grpc.aio.AioRpcError as error:
            reason = dict(iter(error.trailing_metadata() or ())).get(REASON_KEY)
            if error.details() == "Internal error from Core":  # of this end: a write came too late
                return "ENDED_EARLY", ""
            answer = f"refused {reason}" if reason else error.code().name
            return answer, str(error.details())
        except asyncio.CancelledError:
            return "CANCELLED", ""
        return "OK", ""

    async def _refresh(self, channel: grpc.aio.Channel) -> None:
        """Join again, as a right site, and learn where the run stands."""

        async def call(method: str, request: bytes) -> bytes:
            return bytes(await channel.unary_unary(method)(request, timeout=30.0))

        await self._mutator.refresh(call)

    def _speak_no_grpc(self) -> None:
        """Random bytes, and random HTTP/2 frames, behind a right handshake."""
        context = ssl.create_default_context(cafile=str(self._bundle.with_name("ca.pem")))
        context.load_cert_chain(self._bundle)
        context.set_alpn_protocols(["h2"])
        host, port = self._address.split(":")
        junk = self._random.randbytes(self._random.randrange(1, 4000))
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        frame = len(junk).to_bytes(3, "big") + self._random.randbytes(6)
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host, int(port)), 10.0) as raw,
            context.wrap_socket(raw, server_hostname=host) as connection,
        ):
            connection.settimeout(2.0)
            connection.sendall(self._random.choice((junk, preface + frame + junk)))
            connection.recv(1024)


@contextlib.contextmanager
def coordinator(directory: Path, certs: Certs) -> Iterator[tuple[str, psutil.Process]]:
    """`loco coordinator` as a process, on a run of the tests' layout."""
    config = config_of(**CONFIG)
    create_store(directory / "state", config, layout=LAYOUT).close()
    path = directory / "run.toml"
    path.write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)))
    command = [
        sys.executable, "-m", "loco", "coordinator", str(path), "--state", str(directory / "state"),
        "--listen", "127.0.0.1:0", "--bundle", str(certs.coordinator),
    ]  # fmt: skip
    with (directory / "coordinator.log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log)
    try:
        address, until = directory / "state" / "address", time.monotonic() + 60.0
        while not address.exists():
            assert process.poll() is None, (directory / "coordinator.log").read_text()
            assert time.monotonic() < until
            time.sleep(0.1)
        yield address.read_text(), psutil.Process(process.pid)
        process.terminate()
        process.wait(60.0)
    finally:
        process.kill()
        process.wait()


def fuzz(
    calls: int, seed: int, directory: Path, say: Any = print, minutes: float = 600.0
) -> Outcome:
    """The whole experiment; `directory` must be empty."""
    certs, outcome, began = Certs(directory / "certs"), Outcome(), time.monotonic()

    def sample(so_far: Outcome) -> None:
        rss = round(process.memory_info().rss / 2**20, 1)
        so_far.rss_mib.append((so_far.calls, rss))
        rate = so_far.calls / (time.monotonic() - began)
        say(f"{so_far.calls} calls, {rate:.0f}/s, {rss} MiB, round {sites[0].site.round}")

    with coordinator(directory, certs) as (address, process):
        sites = [GoodSite(address, name, certs) for name in GOOD]
        mallory = Mallory(address, certs.bundle("mallory"), seed)
        until = time.monotonic() + 60.0 * minutes
        asyncio.run(mallory.attack(calls, until, outcome, sample))
        at = sites[0].site.round
        time.sleep(3.0)
        for site in sites:
            site.stop()
            if site.error is not None:
                outcome.faults.append(f"{site.site.name}: {site.error!r}")
        outcome.good_rounds = sites[0].site.round
        if outcome.good_rounds <= at:
            outcome.faults.append("no round was finished after the attack")
        if not process.is_running():
            outcome.faults.append("the coordinator has ended")
    log = (directory / "coordinator.log").read_text(errors="replace")
    if "Traceback" in log:
        outcome.faults.append(f"a traceback in the log: {log[log.index('Traceback') :][:2000]}")
    outcome.faults += check_state(directory / "state").faults
    outcome.seconds = round(time.monotonic() - began, 1)
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=600.0, help="at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object at the end")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="loco-fuzz-") as directory:
        outcome = fuzz(
            options.calls,
            options.seed,
            Path(directory),
            lambda line: print(line, flush=True),
            options.minutes,
        )
    print(json.dumps(vars(outcome)) if options.json else outcome)
    sys.exit(1 if outcome.faults or outcome.undocumented else 0)


if __name__ == "__main__":
    main()
