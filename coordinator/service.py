"""The gRPC service: translates between the wire and the engine.

Every request that the gate let in is metered, checked for membership where it needs one, and
answered, or refused (RefusedRequest, which the gate turns into gRPC's answer). Files and decoding
happen in threads, never on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from coordinator.admission import caught_up, check_member, directive, may_go_on
from coordinator.control import order_of
from coordinator.engine import Engine
from coordinator.events import Heard, Refuse, SiteJoined, SiteLeft
from coordinator.monitor import Monitor
from coordinator.notes import printable
from coordinator.probe import Probes
from coordinator.refused import RefusedRequest, check_run, raise_refusal
from coordinator.settings import in_force, k_of_round, own_step_of_round
from coordinator.state import State, Update
from coordinator.upload import Uploads
from loco.config import check_site_name
from loco.digest import file_digest
from loco.errors import ConfigError
from loco.layout import Layout
from loco.wire.blocks import make_block
from loco.wire.protocol import (
    BLOCK_BYTES,
    INLINE_UPDATE_BYTES,
    PROTOCOL_VERSION,
    sizes_by_kind,
    wire_size,
)
from loco.wire.v1 import coordinator_pb2 as pb
from loco.wire.v1 import coordinator_pb2_grpc as pb_grpc

log = logging.getLogger("loco.coordinator")

Context = grpc.aio.ServicerContext[Any, Any]
RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)

MAX_WAIT_SECONDS = 30.0
_LONGEST_INSTANCE = 64  # it is journaled, and part of every snapshot
_MOST_DIMENSIONS = 64  # torch has no tensors of more


class Service(pb_grpc.CoordinatorServiceServicer):
    """One method a verb of the proto; see there for what each is for."""

    def __init__(self, engine: Engine, monitor: Monitor) -> None:
        self._engine = engine
        self._monitor = monitor
        self._store = engine.store
        self._probes = Probes(
            self._check_protocol,
            lambda direction, message: self._count("", direction, "control", message),
        )
        self._uploads = Uploads(engine, monitor, self._count)
        self._small: tuple[int, asyncio.Task[pb.Block]] | None = None
        self._sound = -1  # newest round whose update was read and found as it was made

    # --- the verbs ------------------------------------------------------------------------------

    async def GetRun(self, request: pb.GetRunRequest, context: Context) -> pb.GetRunResponse:
        return await self._unary(self._get_run, request, site="")

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinResponse:
        return await self._unary(self._join, request, site=request.site)

    async def Heartbeat(
        self, request: pb.HeartbeatRequest, context: Context
    ) -> pb.HeartbeatResponse:
        return await self._unary(self._heartbeat, request, site=request.caller.site)

    async def WaitRound(
        self, request: pb.WaitRoundRequest, context: Context
    ) -> pb.WaitRoundResponse:
        return await self._unary(self._wait_round, request, site=request.caller.site)

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveResponse:
        return await self._unary(self._leave, request, site=request.caller.site)

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        return await self._unary(self._status, request, site="")

    async def Push(
        self, request_iterator: AsyncIterator[pb.PushRequest], context: Context
    ) -> pb.PushResponse:
        return await self._uploads.receive(request_iterator)

    async def PushOffset(
        self, request: pb.PushOffsetRequest, context: Context
    ) -> pb.PushOffsetResponse:
        site = request.header.caller.site
        return await self._unary(self._push_offset, request, site=site)

    async def Control(self, request: pb.ControlRequest, context: Context) -> pb.ControlResponse:
        return await self._unary(self._control, request, site="")

    async def Pull(
        self, request: pb.PullRequest, context: Context
    ) -> AsyncIterator[pb.PullResponse]:
        path = self._store.update(request.round)
        async for block in self._download(request, path, "update"):
            response = pb.PullResponse(block=block)
            self._count(request.caller.site, "down", "update", response)
            yield response

    async def Snapshot(
        self, request: pb.SnapshotRequest, context: Context
    ) -> AsyncIterator[pb.SnapshotResponse]:
        found = [s.theta for s in self._store.snapshots.all() if s.round == request.round]
        path = found[0] if found else self._store.directory / "none"
        async for block in self._download(request, path, "snapshot"):
            response = pb.SnapshotResponse(block=block)
            self._count(request.caller.site, "down", "snapshot", response)
            yield response

    async def Probe(
        self, request_iterator: AsyncIterator[pb.ProbeRequest], context: Context
    ) -> AsyncIterator[pb.ProbeResponse]:
        async for response in self._probes.answer(request_iterator):
            yield response

    # --- control --------------------------------------------------------------------------------

    async def _get_run(self, request: pb.GetRunRequest) -> pb.GetRunResponse:
        self._check_protocol(request.protocol_version)
        if request.run_id:
            self._check_run(request.run_id)
        config = self._store.config
        return pb.GetRunResponse(
            run_id=self._store.run_id, config_json=config.to_json(), config_hash=config.hash()
        )

    async def _join(self, request: pb.JoinRequest) -> pb.JoinResponse:
        self._check_protocol(request.protocol_version)
        self._check_run(request.run_id)
        self._check_joiner(request)
        event = SiteJoined(
            site=request.site, instance=request.instance, num_shards=request.num_shards
        )
        raise_refusal(await self._engine.submit(event))
        state, snapshot = self._engine.state, self._store.snapshots.newest()
        site = state.sites[request.site]
        if site.instance != request.instance:  # another one joined in the same moment
            raise RefusedRequest(
                "superseded", f"another process of site {request.site!r} has joined just now"
            )
        return pb.JoinResponse(
            incarnation=site.incarnation,
            snapshot_round=snapshot.round,
            snapshot_digest=snapshot.manifest.theta_digest,
            heartbeat_seconds=self._store.config.quorum.heartbeat_seconds,
            keep_state=request.HasField("have_round")
            and state.digests.get(request.have_round) == request.have_digest,
            data_cursor=site.data_cursor,
            snapshot_entry=self._entry("snapshot", snapshot.round),
        )

    async def _heartbeat(self, request: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
        self._check_caller(request.caller)
        heard = Heard(site=request.caller.site, incarnation=request.caller.incarnation)
        raise_refusal(await self._engine.submit(heard))
        self._monitor.heartbeat(request)
        return pb.HeartbeatResponse(round=self._engine.state.round)

    async def _leave(self, request: pb.LeaveRequest) -> pb.LeaveResponse:
        self._check_caller(request.caller)
        caller = request.caller
        reason = printable(request.reason[:200])
        left = SiteLeft(site=caller.site, incarnation=caller.incarnation, reason=reason)
        raise_refusal(await self._engine.submit(left))
        return pb.LeaveResponse()

    async def _push_offset(self, request: pb.PushOffsetRequest) -> pb.PushOffsetResponse:
        self._check_caller(request.header.caller)
        return pb.PushOffsetResponse(offset=self._uploads.offset(request.header))

    async def _control(self, request: pb.ControlRequest) -> pb.ControlResponse:
        self._check_protocol(request.protocol_version)
        order = order_of(request, self._engine.state)
        raise_refusal(await self._engine.submit(order.event))
        return pb.ControlResponse(message=order.message)

    async def _status(self, request: pb.StatusRequest) -> pb.StatusResponse:
        self._check_protocol(request.protocol_version)
        return pb.StatusResponse(status_json=json.dumps(self._monitor.status(self._engine.state)))

    async def _wait_round(self, request: pb.WaitRoundRequest) -> pb.WaitRoundResponse:
        patience = min(max(request.timeout_seconds, 0.0), MAX_WAIT_SECONDS)
        until = time.monotonic() + patience
        while not self._engine.draining:
            response = await self._next_directive(request)
            left = until - time.monotonic()
            if response.directive != pb.DIRECTIVE_WAIT or left <= 0:
                return response
            await self._engine.changed(left)
        raise RefusedRequest("", "the coordinator is shutting down")

    async def _next_directive(self, request: pb.WaitRoundRequest) -> pb.WaitRoundResponse:
        self._check_caller(request.caller)
        site, have_round = request.caller.site, request.have_round
        ready = caught_up(self._engine.state, site, have_round, request.theta_digest)
        if ready is not None:
            raise_refusal(await self._engine.submit(ready))
        state = self._engine.state
        verdict = directive(
            state, site, have_round, request.theta_digest, contributing=request.contributing
        )
        if isinstance(verdict, Refuse):
            raise RefusedRequest(verdict.reason, verdict.message)
        word, message = verdict
        if word == "update" and not await self._is_sound(have_round):
            word, message = "resync", f"the coordinator's update of round {have_round} is damaged"
            state = self._engine.state
        response = pb.WaitRoundResponse(
            directive=pb.Directive.Value(f"DIRECTIVE_{word.upper()}"), message=message
        )
        if word == "update":
            update = state.updates[have_round]
            if update.size_bytes <= INLINE_UPDATE_BYTES:
                with contextlib.suppress(FileNotFoundError):  # forgotten meanwhile: Pull says so
                    response.update.CopyFrom(await self._small_update(have_round))
            if may_go_on(state, site, have_round):
                response.next.CopyFrom(self._plan(state.round, state))
            mine = update.included.get(site)
            response.update_bytes = update.size_bytes
            response.update_digest = bytes.fromhex(update.digest)
            response.theta_digest = update.theta_digest
            if (entry := self._entry("update", have_round)) is not None:
                response.entry.CopyFrom(entry)
            if mine is not None:
                response.included = True
                response.data_cursor = mine.data_cursor
                response.plan.CopyFrom(self._plan(have_round, update))
                response.plan.site_steps = mine.inner_steps
        elif word == "resync":
            # Else the site was only away for too long, or what it needs is damaged.
            if state.digests.get(have_round, request.theta_digest) != request.theta_digest:
                self._monitor.digest_mismatch(site)
            snapshot = self._store.snapshots.newest()
            response.snapshot_round = snapshot.round
            response.theta_digest = snapshot.manifest.theta_digest
            if (entry := self._entry("snapshot", snapshot.round)) is not None:
                response.entry.CopyFrom(entry)
        elif word == "train":
            response.plan.CopyFrom(self._plan(state.round, state))
        return response

    async def _is_sound(self, round_: int) -> bool:
        """Whether the update is as it was made; if not, there is a snapshot to go on from.

        The newest one is read once, older ones each time that a site which was away needs them.
        """
        if round_ == self._sound:
            return True
        expected, path = self._engine.state.updates[round_].digest, self._store.update(round_)
        try:
            found = (await asyncio.to_thread(file_digest, path)).hex()
        except FileNotFoundError:
            return True  # forgotten meanwhile: Pull says so
        if found == expected:
            self._sound = max(self._sound, round_)
            return True
        log.error(
            "%s has not the digest that the journal states: check this machine's disk; sites that "
            "need it start from a snapshot",
            path,
        )
        await self._engine.snapshot_after(round_)
        return False

    async def _small_update(self, round_: int) -> pb.Block:
        """The whole update, read once for all the sites that wait for it."""
        if self._small is None or self._small[0] != round_:
            self._small = (round_, asyncio.create_task(_read_block(self._store.update(round_))))
        return await asyncio.shield(self._small[1])

    def _entry(self, kind: str, round_: int) -> pb.SignedEntry | None:
        """None where nothing is signed: in plaintext."""
        entry = self._engine.chain.get(kind, round_)
        return pb.SignedEntry(**vars(entry)) if entry is not None and entry.signature else None

    def _plan(self, round_: int, made: State | Update) -> pb.RoundPlan:
        """What a site is to do in the current round, or did in that of an update."""
        config = self._store.config
        inner_steps = int(in_force("inner.steps", config, made.settings, round_))
        return pb.RoundPlan(
            inner_steps=inner_steps,
            first_step=made.first_step,
            total_steps=made.first_step + (config.run.rounds - round_) * inner_steps,
            k=k_of_round(config, made, round_),
            own_step=own_step_of_round(config, made, round_),
        )

    # --- checks ---------------------------------------------------------------------------------

    def _check_protocol(self, version: int) -> None:
        if version != PROTOCOL_VERSION:
            raise RefusedRequest(
                "protocol_version",
                f"the caller speaks protocol version {version}, this coordinator "
                f"{PROTOCOL_VERSION}: install the same version of loco on both sides",
            )

    def _check_run(self, run_id: str) -> None:
        check_run(run_id, self._store.run_id)

    def _check_caller(self, caller: pb.Caller) -> None:
        self._check_run(caller.run_id)
        raise_refusal(check_member(self._engine.state, caller.site, caller.incarnation))

    def _check_joiner(self, request: pb.JoinRequest) -> None:
        try:
            check_site_name(request.site)
        except ConfigError as error:
            raise RefusedRequest("site_name", str(error)) from error
        if len(request.instance) > _LONGEST_INSTANCE:
            raise RefusedRequest(
                "malformed",
                f"site {request.site!r} calls its process life by {len(request.instance)} letters: "
                f"use at most {_LONGEST_INSTANCE}",
            )
        config_hash = self._store.config.hash()
        if request.config_hash != config_hash:
            raise RefusedRequest(
                "config_hash",
                f"site {request.site!r} has config {request.config_hash[:16]!r}, the run "
                f"{config_hash[:16]!r}: fetch the run's config again",
            )
        self._check_layout(request)
        if not 1 <= request.num_shards <= self._store.layout.num_chunks:
            raise RefusedRequest(
                "shard",
                f"site {request.site!r} has {request.num_shards} shards; this model of "
                f"{self._store.layout.num_chunks} chunks can be sharded over 1 to "
                f"{self._store.layout.num_chunks}",
            )
        if request.HasField("have_round") and request.have_round > self._engine.state.round:
            raise RefusedRequest(
                "ahead",
                f"site {request.site!r} holds round {request.have_round}, this coordinator is at "
                f"round {self._engine.state.round}: it lost its state; restore its directory",
            )

    def _check_layout(self, request: pb.JoinRequest) -> None:
        own = self._store.layout
        if request.layout_fingerprint == own.fingerprint:
            return
        # Sizes are products: what nobody means must not be multiplied out on the event loop.
        given = request.layout[: 2 * len(own.parameters) + 1]
        layout = Layout.of((spec.name, tuple(spec.shape[:_MOST_DIMENSIONS])) for spec in given)
        try:
            layout.check_same(own, mine=f"site {request.site!r}", theirs="the run")
        except ConfigError as error:
            raise RefusedRequest("layout", str(error)) from error
        raise RefusedRequest(
            "layout",
            f"layout mismatch: site {request.site!r} has the run's tensors but fingerprint "
            f"{request.layout_fingerprint[:16]!r}, the run has {own.fingerprint[:16]!r}; another "
            "chunk size? install the same version of loco on both sides",
        )

    # --- plumbing -------------------------------------------------------------------------------

    async def _unary(
        self,
        method: Callable[[RequestT], Awaitable[ResponseT]],
        request: RequestT,
        *,
        site: str,
    ) -> ResponseT:
        try:
            response = await method(request)
        finally:
            self._count(site, "up", "control", request)
        for kind, num_bytes in sizes_by_kind(response).items():
            self._monitor.count(site, "down", kind, num_bytes)
        return response

    async def _download(
        self, request: pb.PullRequest | pb.SnapshotRequest, path: Path, kind: str
    ) -> AsyncIterator[pb.Block]:
        """The blocks of a file's range."""
        caller = request.caller
        self._count(caller.site, "up", "control", request)
        self._check_caller(caller)
        with _open_range(request, path, kind) as file:
            left = request.length
            while left:
                data = await asyncio.to_thread(file.read, min(BLOCK_BYTES, left))
                left -= len(data)
                await self._engine.heard(caller.site, caller.incarnation)
                yield make_block(data)

    def _count(self, site: str, direction: str, kind: str, message: Message) -> None:
        self._monitor.count(site, direction, kind, wire_size(message))


async def _read_block(path: Path) -> pb.Block:
    return make_block(await asyncio.to_thread(path.read_bytes))


def _open_range(
    request: pb.PullRequest | pb.SnapshotRequest, path: Path, kind: str
) -> BufferedReader:
    """The file, at the offset asked for; once open, it may be forgotten meanwhile."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise RefusedRequest("not_available", f"no {kind} of round {request.round}") from None
    size, stop = os.fstat(file.fileno()).st_size, request.offset + request.length
    if stop > size:
        file.close()
        raise RefusedRequest(
            "not_available",
            f"bytes {request.offset} to {stop} asked for, the {kind} of round {request.round} "
            f"has {size}",
        )
    file.seek(request.offset)
    return file
