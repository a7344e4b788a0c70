"""The life of a coordinator process: open or create the run, serve, drain, close."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from coordinator.audit import Audit
from coordinator.engine import Engine
from coordinator.files import write_aside
from coordinator.gate import Gate
from coordinator.keys import Keys
from coordinator.limits import Limits
from coordinator.monitor import Monitor
from coordinator.service import Service
from coordinator.store import Store
from coordinator.upload import most_tokens_per_step
from coordinator.web import web_server
from loco.config import Config, load_config
from loco.errors import ConfigError, LocoError
from loco.processes import interrupts_held, raise_file_limit
from loco.wire.access import is_loopback
from loco.wire.protocol import SERVER_OPTIONS, split_address
from loco.wire.v1 import coordinator_pb2 as pb
from loco.wire.v1 import coordinator_pb2_grpc as pb_grpc

log = logging.getLogger("loco.coordinator")

DRAIN_SECONDS = 5.0
HANDSHAKE_SECONDS = 10.0  # a connection that has not said who it is by then is closed
_OWN_FILES = 512  # uploads and downloads in progress, the journal, connections to the page
_SERVICE_NAME = pb.DESCRIPTOR.services_by_name["CoordinatorService"].full_name


def open_run(config_path: Path, state: Path) -> Store:
    """Open the run in `state`, or create it from the config with fresh parameters."""
    config = load_config(config_path)
    if not Store.exists(state):
        _create_in_a_process(config, state)
    store = Store.open(state)
    if config.data.tokenizer_digest is None:
        config = _with_tokenizer(config, store.config.data.tokenizer_digest)
    if store.config.model_copy(update={"limits": config.limits}) != config:
        store.close()
        changed = ", ".join(_differences(store.config, config))
        raise ConfigError(
            f"{config_path} differs from the config that the run in {state} was created with "
            f"({changed}); restore it, or start a new run with another --state"
        )
    store.config = config
    return store


def _create_in_a_process(config: Config, state: Path) -> None:
    """Only the initial parameters need torch, whose 200 MB would stay for as long as the run."""
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as short_lived:
            with interrupts_held():  # the child inherits that, and ends when it is done
                made = short_lived.submit(_create_run, config, state)
            made.result()
    except BrokenProcessPool as error:
        raise LocoError(
            f"the process that makes the run's initial parameters ended early: {error}; is there "
            "memory for them? no run has begun, start again"
        ) from error


def _create_run(config: Config, state: Path) -> None:
    from loco.data import prepared_tokenizer
    from loco.model.initial import initial_parameters

    if config.data.tokenizer_digest is None:
        config = _with_tokenizer(config, prepared_tokenizer(config.data.corpus))
    layout, theta = initial_parameters(config)
    run_id = f"{config.run.name}-{secrets.token_hex(4)}"
    Store.create(state, run_id=run_id, config=config, layout=layout, theta=theta).close()


def _with_tokenizer(config: Config, digest: str | None) -> Config:
    data = config.data.model_copy(update={"tokenizer_digest": digest})
    return config.model_copy(update={"data": data})


def _differences(old: Config, new: Config) -> Iterator[str]:
    for section in type(old).model_fields.keys() - {"limits"}:
        before, after = getattr(old, section), getattr(new, section)
        for key in type(before).model_fields:
            if getattr(before, key) != getattr(after, key):
                was, now = getattr(before, key), getattr(after, key)
                yield f"{section}.{key} was {was!r}, is {now!r}"


@dataclass(frozen=True, kw_only=True)
class Running:
    """A coordinator that answers."""

    address: str
    engine: Engine
    monitor: Monitor


@dataclass(frozen=True, kw_only=True)
class Where:
    """At which addresses the coordinator answers, and to whom."""

    listen: str
    """HOST:PORT for sites, operators and readers."""
    metrics: str | None = None
    """HOST:PORT of page and metrics."""
    metrics_token: Path | None = None
    """File with a token that lets in to page and metrics."""
    keys: Keys | None = None
    """None: plaintext, to everyone who reaches the address."""


def check_plaintext(where: Where, *, insecure: bool) -> None:
    """ConfigError where plaintext would leave this machine and nobody has said so."""
    for flag, address in (("--listen", where.listen), ("--metrics", where.metrics)):
        if address is None:
            continue
        exposed = where.keys is None and not is_loopback(split_address(address)[0])
        if exposed and not insecure:
            raise ConfigError(
                f"{flag} {address} is reached from other machines, and without --bundle everyone "
                "may read and command there: make one (loco certs init), or say --insecure"
            )
    if insecure and where.keys is not None:
        raise ConfigError("--bundle and --insecure exclude each other: leave one out")


async def serve(store: Store, where: Where) -> None:
    """Serve the run until SIGTERM or SIGINT, or until the engine fails."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    if most_tokens_per_step(store.config) is None:
        log.warning(
            "a site may state any number of tokens, and they are its weight: bound them with "
            "limits.tokens_per_step"
        )
    async with running(store, where) as coordinator:
        await _until_told_to_stop(coordinator.engine, stop)
        log.info("draining")


@contextlib.asynccontextmanager
async def running(store: Store, where: Where) -> AsyncIterator[Running]:
    """Answer while the block runs; then drain, and close the store.

    The address, with the port that was given for port 0, is in `address` of the state directory.
    """
    plaintext = where.keys is None and not is_loopback(split_address(where.listen)[0])
    monitor = Monitor(store, keys=where.keys, plaintext=plaintext)
    engine = Engine(store, monitor.observe, where.keys)
    audit = Audit(store.directory)
    gate = Gate(where.keys, Limits(store.config.limits), monitor, audit)
    server = grpc.aio.server(interceptors=(gate,), options=_options(store.config))
    pb_grpc.add_CoordinatorServiceServicer_to_server(Service(engine, monitor), server)
    await _add_standard_services(server)
    address = f"{split_address(where.listen)[0]}:{_bind(server, where)}"
    pages_served = web_server(
        where.metrics, monitor, lambda: engine.state, audit, where.keys, where.metrics_token
    )
    async with pages_served as pages, _keeping_house(monitor):
        await engine.start()
        await server.start()
        pages.ready = True
        with write_aside(store.directory / "address") as file:
            file.write(address.encode())
        log.info(
            "run %s: listening on %s, round %d of %d",
            store.run_id,
            address,
            engine.state.round,
            store.config.run.rounds,
        )
        try:
            yield Running(address=address, engine=engine, monitor=monitor)
        finally:
            pages.ready = False
            engine.drain()
            await server.stop(DRAIN_SECONDS)
            await engine.stop()
            audit.close()


@contextlib.asynccontextmanager
async def _keeping_house(monitor: Monitor) -> AsyncIterator[None]:
    task = asyncio.create_task(monitor.keep_house())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await monitor.close()


def _options(config: Config) -> tuple[tuple[str, int], ...]:
    return (
        *SERVER_OPTIONS,
        ("grpc.max_allowed_incoming_connections", _connections(config.limits.connections)),
        ("grpc.max_concurrent_streams", config.limits.calls_at_once),  # a connection
        ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_SECONDS)),
    )


def _connections(wanted: int) -> int:
    """As many as leave files for the coordinator itself: strangers must not take the last ones."""
    allowed = max(1, raise_file_limit() - _OWN_FILES)
    if allowed < wanted:
        log.warning(
            "limits.connections is %d, and this process may have %d files (ulimit -n): %d "
            "connections are let in",
            wanted,
            allowed + _OWN_FILES,
            allowed,
        )
    return min(wanted, allowed)


def _bind(server: grpc.aio.Server, where: Where) -> int:
    try:
        if where.keys is None:
            return server.add_insecure_port(where.listen)
        return server.add_secure_port(where.listen, where.keys.credentials())
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen on {where.listen}: the port is in use or the address is not of this "
            "machine; is another coordinator running? give another --listen"
        ) from error


async def _add_standard_services(server: grpc.aio.Server) -> None:
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    for name in ("", _SERVICE_NAME):
        await health.set(name, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection(
        (
            _SERVICE_NAME,
            health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
            reflection.SERVICE_NAME,
        ),
        server,
    )


async def _until_told_to_stop(engine: Engine, stop: asyncio.Event) -> None:
    waiting = asyncio.create_task(stop.wait())
    await asyncio.wait((waiting, engine.failed), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if engine.failed.done():
        engine.failed.result()  # raises what the reducer raised
