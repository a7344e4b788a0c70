"""The site's pulse: heartbeats on a channel of their own, so that data never starves them."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from loco.metrics import WireMetrics
from loco.wire.protocol import CHANNEL_OPTIONS, wire_size
from loco.wire.v1 import coordinator_pb2 as pb
from loco.wire.v1 import coordinator_pb2_grpc as pb_grpc

log = logging.getLogger("loco.worker")


class Pulse:
    """What the leader tells of the site; other ranks keep one too and never send it."""

    def __init__(self) -> None:
        self._beat = pb.HeartbeatRequest()
        self._seconds: dict[pb.SitePhase.ValueType, float] = defaultdict(float)
        self._phase: pb.SitePhase.ValueType = pb.SITE_PHASE_SYNC
        self._since = time.monotonic()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def edit(self) -> Iterator[pb.HeartbeatRequest]:
        """Change several fields of the next beat at once."""
        with self._lock:
            yield self._beat

    @contextmanager
    def phase(self, phase: pb.SitePhase.ValueType) -> Iterator[None]:
        """Account the time of a block to a phase."""
        before = self._switch(phase)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, phase: pb.SitePhase.ValueType) -> pb.SitePhase.ValueType:
        with self._lock:
            now = time.monotonic()
            before, self._phase = self._phase, phase
            self._seconds[before] += now - self._since
            self._since = now
            return before

    def start(self, address: str, caller: pb.Caller, interval: float, wire: WireMetrics) -> None:
        """Beat every `interval` seconds until `stop`."""
        self._beat.caller.CopyFrom(caller)
        self._thread = threading.Thread(
            target=self._run, args=(address, interval, wire), name="heartbeat", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Send a last beat and end."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, address: str, interval: float, wire: WireMetrics) -> None:
        # A separate subchannel pool, or gRPC would share the data's connection.
        options = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        with grpc.insecure_channel(address, options=options) as channel:
            stub = pb_grpc.CoordinatorServiceStub(channel)
            while not self._stop.wait(interval):
                self._send(stub, wire)
            self._send(stub, wire)

    def _send(self, stub: pb_grpc.CoordinatorServiceStub, wire: WireMetrics) -> None:
        beat = self._snapshot()
        wire.count(beat.caller.site, "up", "control", wire_size(beat))
        try:
            answer = stub.Heartbeat(beat, timeout=10.0)
        except grpc.RpcError as error:
            # The main loop meets the same coordinator and decides; the pulse only tries again.
            log.debug("heartbeat: %s", error)
            return
        wire.count(beat.caller.site, "down", "control", wire_size(answer))

    def _snapshot(self) -> pb.HeartbeatRequest:
        self._switch(self._phase)
        with self._lock:
            beat = pb.HeartbeatRequest()
            beat.CopyFrom(self._beat)
            beat.phase = self._phase
            for phase, seconds in self._seconds.items():
                beat.phase_seconds.add(phase=phase, seconds=seconds)
            return beat
