"""A real coordinator on loopback, in a thread of the test, and raw members that talk to it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import grpc
from support.certs import Certs, channel
from support.runs import Array, digest_of, shard_body

from coordinator.server import Running, Where, running
from coordinator.store import Store
from loco.digest import bytes_digest
from loco.layout import Layout
from loco.wire.blocks import make_block
from loco.wire.protocol import BLOCK_BYTES, CHANNEL_OPTIONS, PROTOCOL_VERSION
from loco.wire.v1 import coordinator_pb2 as pb
from loco.wire.v1 import coordinator_pb2_grpc as pb_grpc

WAIT_SECONDS = 30.0

left_running: set[Coordinator] = set()
"""Those that serve; tests/conftest.py stops what is left where a test fails before it does."""


def eventually(condition: Callable[[], Any], what: str, seconds: float = WAIT_SECONDS) -> Any:
    """Poll until `condition` is true and return what it gave; AssertionError names `what`."""
    until = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < until, f"after {seconds} s still not: {what}"
        time.sleep(0.02)


class Coordinator:
    """Serves `store` until `stop`; `running` has its engine and monitor."""

    def __init__(
        self, store: Store, listen: str = "127.0.0.1:0", certs: Certs | None = None
    ) -> None:
        """Plaintext without `certs`."""
        self.store = store
        self.certs = certs
        self._where = Where(listen=listen, keys=certs.keys() if certs else None)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._error: BaseException | None = None
        self.running: Running
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error
        left_running.add(self)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            async with running(self.store, self._where) as self.running:
                self._ready.set()
                await self._stop.wait()
        except BaseException as error:
            self._error = error
            self.store.close()
        finally:
            self._ready.set()

    def stop(self) -> None:
        """Drain as SIGTERM does."""
        left_running.discard(self)
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        if self._error is not None:
            raise self._error

    @property
    def address(self) -> str:
        return self.running.address

    @property
    def state(self) -> Any:
        return self.running.engine.state

    def channel(self, name: str, role: str = "site") -> grpc.Channel:
        """A connection of its own, with the certificate of `name` where there are any."""
        if self.certs is None:
            return grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        return channel(self.address, self.certs.bundle(name, role))

    def metric(self, name: str, **labels: str) -> float:
        """A sample of /metrics; 0 where there is none yet."""
        return self.running.monitor.registry.get_sample_value(name, labels) or 0.0


@contextlib.contextmanager
def coordinating(store: Store, certs: Certs | None = None) -> Iterator[Coordinator]:
    coordinator = Coordinator(store, certs=certs)
    try:
        yield coordinator
    finally:
        coordinator.stop()


class Member:
    """A site that says exactly what a test wants it to say."""

    def __init__(self, coordinator: Coordinator, site: str, *, ranks: int = 1) -> None:
        self.coordinator = coordinator
        self.store = coordinator.store
        self.site = site
        self.ranks = ranks
        self.channel = coordinator.channel(site)
        self.stub = pb_grpc.CoordinatorServiceStub(self.channel)
        self.caller = pb.Caller(run_id=self.store.run_id, site=site)

    def __enter__(self) -> Member:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def join(self, *, layout: Layout | None = None, **changes: Any) -> pb.JoinResponse:
        """Join as a right site would, except for `changes`."""
        layout = layout or self.store.layout
        fields: dict[str, Any] = {
            "protocol_version": PROTOCOL_VERSION,
            "run_id": self.store.run_id,
            "site": self.site,
            "instance": f"{self.site}-{id(self)}",
            "num_shards": self.ranks,
            "config_hash": self.store.config.hash(),
            "layout_fingerprint": layout.fingerprint,
            "layout": [pb.TensorSpec(name=p.name, shape=p.shape) for p in layout.parameters],
            **changes,
        }
        answer = self.stub.Join(pb.JoinRequest(**fields), timeout=WAIT_SECONDS)
        self.caller.incarnation = answer.incarnation
        return answer

    def wait(
        self, have_round: int, digest: str | None = None, *, timeout: float = 0.0
    ) -> pb.WaitRoundResponse:
        """The directive for a site that holds theta of a round (by default the run's own)."""
        request = pb.WaitRoundRequest(
            caller=self.caller,
            have_round=have_round,
            theta_digest=self._theta_digest() if digest is None else digest,
            timeout_seconds=timeout,
        )
        return self.stub.WaitRound(request, timeout=WAIT_SECONDS)

    def enter(self) -> Member:
        """Join, and say that theta of the current round is here."""
        self.join()
        self.wait(self.coordinator.state.round)
        return self

    def header(self, round_: int, body: bytes, **changes: Any) -> pb.PushHeader:
        """The header of a right push, except for `changes`."""
        fields: dict[str, Any] = {
            "caller": self.caller,
            "round": round_,
            "shard": 0,
            "num_shards": self.ranks,
            "size_bytes": len(body),
            "digest": bytes_digest(body),
            "tokens": 100,
            "inner_steps": 2,
            "theta_digest": self._theta_digest(),
            **changes,
        }
        return pb.PushHeader(**fields)

    def push(self, round_: int, body: bytes, **changes: Any) -> pb.PushResponse:
        """Header and body; `changes` go into the header."""
        return self.send(self.header(round_, body, **changes), body)

    def send(
        self, header: pb.PushHeader, body: bytes, block_bytes: int = BLOCK_BYTES
    ) -> pb.PushResponse:
        def messages() -> Iterator[pb.PushRequest]:
            yield pb.PushRequest(header=header)
            for start in range(0, len(body), block_bytes):
                yield pb.PushRequest(block=make_block(body[start : start + block_bytes]))

        return self.stub.Push(messages(), timeout=WAIT_SECONDS)

    def contribute(self, round_: int, a: Array, *, tokens: int = 100) -> None:
        """All shards of `a` [num_elements]."""
        for rank in range(self.ranks):
            body = shard_body(
                a, self.store.config, layout=self.store.layout, rank=rank, ranks=self.ranks
            )
            self.push(round_, body, shard=rank, tokens=tokens)

    def pull(self, round_: int, offset: int, length: int) -> bytes:
        request = pb.PullRequest(caller=self.caller, round=round_, offset=offset, length=length)
        answers = self.stub.Pull(request, timeout=WAIT_SECONDS)
        return b"".join(answer.block.data for answer in answers)

    def snapshot(self, round_: int, offset: int, length: int) -> bytes:
        request = pb.SnapshotRequest(caller=self.caller, round=round_, offset=offset, length=length)
        answers = self.stub.Snapshot(request, timeout=WAIT_SECONDS)
        return b"".join(answer.block.data for answer in answers)

    def beat(self, **fields: Any) -> pb.HeartbeatResponse:
        request = pb.HeartbeatRequest(caller=self.caller, **fields)
        return self.stub.Heartbeat(request, timeout=WAIT_SECONDS)

    def _theta_digest(self) -> str:
        return str(self.coordinator.state.theta_digest)


def refusal(error: grpc.RpcError) -> tuple[str, str]:
    """(reason, message) of a refused call; fails if it was another failure."""
    call = cast(grpc.Call, error)
    assert call.code() == grpc.StatusCode.FAILED_PRECONDITION, call
    trailing = dict(iter(call.trailing_metadata() or ()))
    return str(trailing["loco-reason"]), str(call.details())


__all__ = ["Coordinator", "Member", "coordinating", "digest_of", "eventually", "refusal"]
