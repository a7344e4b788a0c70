"""What the coordinator serves at its --metrics address: metrics, probes, and a page to watch.

/               the page (coordinator/page): polls the documents below, runs no inline script
/status.json    the status document (coordinator.status)
/history.json   numbers by round: ?since=ROUND gives the rounds from there on
/timeline.json  phases by site with their times: ?since=SECONDS gives those that ended later
/metrics        Prometheus
/healthz        200 while the process answers
/readyz         200 while sites can join; 503 while it starts or drains
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import resources
from pathlib import Path

from aiohttp import web
from prometheus_client.aiohttp import make_aiohttp_handler

from coordinator.audit import Audit
from coordinator.door import Door
from coordinator.guard import OPEN, Guard
from coordinator.keys import Keys
from coordinator.monitor import Monitor
from coordinator.state import State
from loco.errors import ConfigError
from loco.wire.protocol import split_address

log = logging.getLogger("loco.coordinator")

PAGE = resources.files("coordinator").joinpath("page")
_FILES = ("index.html", "page.css", "uPlot.css", "page.js", "charts.js", "uPlot.js")
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_RENEW_SECONDS = 1.0
_LONGEST_PATH = 200  # in the audit log
SILENT_SECONDS = 60.0  # a connection that asks for nothing for so long is closed
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Pages:
    """The handlers: they read, and change nothing."""

    def __init__(
        self, monitor: Monitor, state: Callable[[], State], guard: Guard, audit: Audit
    ) -> None:
        self._monitor = monitor
        self._audit = audit
        self._guard = guard
        self._state = state
        self.ready = False
        """Whether sites can join."""

    def application(self) -> web.Application:
        app = web.Application(middlewares=[_with_headers, self._guarded])
        for path, handler in (
            ("/status.json", self._status),
            ("/history.json", self._history),
            ("/timeline.json", self._timeline),
            ("/metrics", make_aiohttp_handler(self._monitor.registry)),
            ("/healthz", self._healthz),
            ("/readyz", self._readyz),
        ):
            app.router.add_get(path, handler)
        for name in _FILES:
            path = "/" if name == "index.html" else f"/{name}"
            kind = _TYPES[name.rpartition(".")[2]]
            app.router.add_get(path, _serve(PAGE.joinpath(name).read_bytes(), kind))
        return app

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in OPEN or self._guard.admits(request):
            return await handler(request)
        self._monitor.metrics.run.rejections.labels("identity").inc()
        self._audit.refusal(
            "a visitor without certificate or token",
            str(request.remote),
            method=request.path[:_LONGEST_PATH],
            reason="identity",
            message="the page is for readers and operators",
        )
        raise web.HTTPUnauthorized(
            text="use the certificate of a reader or an operator, or the token\n",
            headers={"WWW-Authenticate": 'Basic realm="loco", charset="UTF-8"'},
        )

    async def _status(self, _: web.Request) -> web.Response:
        return _json(self._monitor.status(self._state()))

    async def _history(self, request: web.Request) -> web.Response:
        return _json(self._monitor.history.document(int(_number(request, "since"))))

    async def _timeline(self, request: web.Request) -> web.Response:
        return _json(self._monitor.timeline(_number(request, "since")))

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        if self.ready:
            return web.Response(text="ready\n")
        return web.Response(text="starting or draining\n", status=503)


def _number(request: web.Request, name: str) -> float:
    text = request.query.get(name, "0")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e15:
        raise web.HTTPBadRequest(text=f"{name}={text!r} is not possible: use a number from 0 on\n")
    return value


def _json(document: object) -> web.Response:
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    response = web.Response(text=text, content_type="application/json")
    response.enable_compression()
    return response


def _serve(body: bytes, content_type: str) -> Handler:
    async def handler(_: web.Request) -> web.Response:
        response = web.Response(body=body, content_type=content_type, charset="utf-8")
        response.enable_compression()
        return response

    return handler


@web.middleware
async def _with_headers(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        response = await handler(request)
    except web.HTTPException as error:
        error.headers.update(_HEADERS)
        raise
    response.headers.update(_HEADERS)
    return response


@contextlib.asynccontextmanager
async def web_server(
    address: str | None,
    monitor: Monitor,
    state: Callable[[], State],
    audit: Audit,
    keys: Keys | None = None,
    token: Path | None = None,
) -> AsyncIterator[Pages]:
    """Serve on HOST:PORT while the block runs; the block says whether the coordinator is ready.

    The address, with the port that was given for port 0, is in `web-address` of the state
    directory.
    """
    guard = Guard(address or "localhost:0", keys, token)
    pages = Pages(monitor, state, guard, audit)
    if address is None:
        yield pages
        return
    host, port = split_address(address)
    runner = web.AppRunner(
        pages.application(),
        access_log=None,
        handle_signals=False,
        keepalive_timeout=SILENT_SECONDS,
    )
    await runner.setup()
    assert runner.server is not None
    try:
        door = _door(host, port)
        async with door.open(runner.server, guard.context):
            bound = f"{host}:{door.port}"
            (monitor.store.directory / "web-address").write_text(bound, encoding="utf-8")
            scheme = "http" if guard.context is None else "https"
            log.info("page on %s://%s/, metrics on %s://%s/metrics", scheme, bound, scheme, bound)
            async with _renewing(guard):
                yield pages
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def _renewing(guard: Guard) -> AsyncIterator[None]:
    async def for_ever() -> None:
        while True:
            await asyncio.sleep(_RENEW_SECONDS)
            guard.renew()

    task = asyncio.create_task(for_ever())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _door(host: str, port: int) -> Door:
    try:
        return Door(host, port)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(
            f"cannot serve metrics on {host}:{port}: {reason}; give another --metrics"
        ) from error
