"""Who may see page and metrics, over real HTTP and TLS: aiohttp's client, and Prometheus itself.

Compared with: the answers written down here. Loopback is taken for an address of the network.
Run alone: pytest tests/coordinator/test_guard.py
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import json
import ssl
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import aiohttp
import pytest
import yaml
from support.certs import Certs
from support.cluster import free_port
from support.live import eventually
from support.play import playing
from support.programs import program
from support.runs import config_of, create_store

from coordinator import guard, keys, web
from coordinator.audit import REFUSALS, Audit
from coordinator.web import web_server
from loco.errors import ConfigError

T = TypeVar("T")
TOKEN = "correct-horse-battery-staple"
Ask = Callable[..., Awaitable[int]]


@pytest.fixture
def certs(tmp_path: Path) -> Certs:
    return Certs(tmp_path / "certs", hosts=("127.0.0.1", "localhost"))


@pytest.fixture
def exposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only loopback is here to listen on: take it for an address of the network."""
    monkeypatch.setattr(guard, "is_loopback", lambda host: False)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(TOKEN + "\n")
    return path


def serve(
    tmp_path: Path,
    look: Callable[[Ask, str], Awaitable[T]],
    certs: Certs | None = None,
    token: Path | None = None,
) -> T:
    """Serve a run; `look` gets a function (path, bundle, headers) -> status, and the address."""
    with playing(create_store(tmp_path / "state", config_of())) as play:

        async def main() -> T:
            own = certs.keys() if certs else None
            audit = Audit(play.store.directory)
            async with web_server(
                "127.0.0.1:0", play.monitor, lambda: play.state, audit, own, token
            ):
                address = (play.store.directory / "web-address").read_text()
                try:
                    return await look(_asker(address, certs), address)
                finally:
                    audit.close()

        return asyncio.run(main())


def _asker(address: str, certs: Certs | None) -> Ask:
    async def ask(path: str, bundle: Path | None = None, **headers: str) -> int:
        context = _context(certs, bundle) if certs else None
        scheme = "https" if certs else "http"
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{scheme}://{address}{path}", ssl=context, headers=headers) as answer,
        ):
            return answer.status

    return ask


def _context(certs: Certs, bundle: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=certs.authority_pem())
    if bundle is not None:
        context.load_cert_chain(bundle)
    return context


# --- who may --------------------------------------------------------------------------------------


def test_certificates_of_readers_and_operators_and_nobody_else(
    tmp_path: Path, certs: Certs, exposed: None
) -> None:
    paths = {
        "reader": certs.bundle("prometheus", "reader"),
        "operator": certs.bundle("ops", "operator"),
        "site": certs.bundle("paris"),
        "revoked": certs.bundle("old", "reader"),
        "nameless": certs.nameless(),
    }
    certs.authority.revoke("old")

    async def look(ask: Ask, _: str) -> dict[str, int]:
        seen = {name: await ask("/metrics", path) for name, path in paths.items()}
        return seen | {"nobody": await ask("/metrics")}

    assert serve(tmp_path, look, certs) == {
        "reader": 200, "operator": 200, "site": 401, "revoked": 401, "nameless": 401, "nobody": 401,
    }  # fmt: skip


def test_a_certificate_that_is_no_good_does_not_even_connect(
    tmp_path: Path, certs: Certs, exposed: None
) -> None:
    strangers = Certs(tmp_path / "strangers")
    expired = certs.odd("old", role="reader", end=timedelta(seconds=-1))

    async def look(ask: Ask, _: str) -> int:
        failed = 0
        for path in (strangers.bundle("prometheus", "reader"), expired):
            with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
                await ask("/metrics", path)
            failed += 1
        return failed

    assert serve(tmp_path, look, certs) == 2


@pytest.mark.parametrize("path", ["/", "/status.json", "/history.json", "/metrics", "/page.js"])
def test_every_page_is_guarded_and_probes_are_not(
    tmp_path: Path, certs: Certs, exposed: None, path: str
) -> None:
    async def look(ask: Ask, _: str) -> tuple[int, ...]:
        return await ask(path), await ask("/healthz"), await ask("/readyz")

    assert serve(tmp_path, look, certs) == (401, 200, 503)


def test_a_token_as_prometheus_and_as_a_browser_send_it(tmp_path: Path, token: Path) -> None:
    """Also on loopback, once it is asked for."""
    basic = "Basic " + base64.b64encode(f"anyone:{TOKEN}".encode()).decode()
    wrong = "Basic " + base64.b64encode(b"anyone:wrong").decode()
    headers = (f"Bearer {TOKEN}", basic, "", "Bearer wrong", wrong, "Basic ???", f"Other {TOKEN}")

    async def look(ask: Ask, _: str) -> list[int]:
        return [await ask("/metrics", Authorization=header) for header in headers]

    assert serve(tmp_path, look, token=token) == [200, 200, 401, 401, 401, 401, 401]


def test_whoever_is_turned_away_is_in_the_audit_log(tmp_path: Path, token: Path) -> None:
    """Also with a token that is no text, which is no error of ours."""

    def status(address: str) -> int:
        headers = {"Authorization": "Bearer \xff\xfe"}
        with contextlib.closing(http.client.HTTPConnection(address, timeout=20)) as connection:
            connection.request("GET", "/status.json", headers=headers)
            with connection.getresponse() as answer:
                return answer.status

    async def look(_: Ask, address: str) -> int:
        return await asyncio.to_thread(status, address)

    assert serve(tmp_path, look, token=token) == 401
    (line,) = (tmp_path / "state" / REFUSALS).read_text().splitlines()
    told = json.loads(line)
    assert (told["method"], told["reason"], told["peer"]) == (
        "/status.json", "identity", "127.0.0.1",
    )  # fmt: skip


def test_a_connection_that_asks_for_nothing_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "SILENT_SECONDS", 0.2)

    async def look(_: Ask, address: str) -> bytes:
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(20):
            ended = await reader.read()
        writer.close()
        return ended

    assert serve(tmp_path, look) == b""


def test_a_replaced_token_counts_at_once(tmp_path: Path, token: Path) -> None:
    async def look(ask: Ask, _: str) -> tuple[int, ...]:
        before = await ask("/metrics", Authorization=f"Bearer {TOKEN}")
        token.write_text("another-token-of-enough-letters")
        return before, await ask("/metrics", Authorization=f"Bearer {TOKEN}")

    assert serve(tmp_path, look, token=token) == (200, 401)


def test_bad_token_files_are_refused_at_the_start(tmp_path: Path, token: Path) -> None:
    async def look(ask: Ask, _: str) -> None:
        raise AssertionError("it has started")

    for spoil, says in (
        (lambda: token.chmod(0o644), "everyone may read the token"),
        (lambda: token.write_text("short"), "has 5 letters: use at least 16"),
        (token.unlink, "cannot read the token"),
    ):
        spoil()
        with pytest.raises(ConfigError, match=says):
            serve(tmp_path / says[:4], look, token=token)
        if token.exists():
            token.chmod(0o600)


def test_loopback_without_a_token_is_open(tmp_path: Path) -> None:
    async def look(ask: Ask, _: str) -> int:
        return await ask("/metrics")

    assert serve(tmp_path, look) == 200


def test_it_speaks_tls_1_3_only(tmp_path: Path, certs: Certs, exposed: None) -> None:
    async def look(_: Ask, address: str) -> None:
        old = _context(certs, None)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        host, port = address.split(":")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection(host, int(port), ssl=old)
        old.maximum_version = ssl.TLSVersion.TLSv1_3
        _, writer = await asyncio.open_connection(host, int(port), ssl=old)
        writer.close()

    serve(tmp_path, look, certs)


def test_a_renewed_certificate_is_served(
    tmp_path: Path, certs: Certs, exposed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(web, "_RENEW_SECONDS", 0.05)
    reader = certs.bundle("prometheus", "reader")

    async def served(address: str) -> int:
        host, port = address.split(":")
        _, writer = await asyncio.open_connection(host, int(port), ssl=_context(certs, None))
        certificate = writer.get_extra_info("peercert")
        writer.close()
        return int(certificate["serialNumber"], 16)

    async def look(ask: Ask, address: str) -> bool:
        before = await served(address)
        certs.authority.issue("coordinator", role="coordinator")
        await ask("/metrics", reader)  # a look at the files
        until = time.monotonic() + 10
        while await served(address) == before:
            assert time.monotonic() < until
            await asyncio.sleep(0.05)
        return True

    assert serve(tmp_path, look, certs)


# --- Prometheus -----------------------------------------------------------------------------------


@pytest.fixture
def prometheus(tmp_path: Path, certs: Certs) -> Iterator[Callable[[str], str]]:
    """Starts a server that scrapes an address as docs/security.md says: its API's address."""
    started: list[subprocess.Popen[bytes]] = []

    def start(target: str) -> str:
        bundle = str(certs.bundle("prometheus", "reader"))
        scrape = {
            "job_name": "loco",
            "scheme": "https",
            "tls_config": {"ca_file": bundle, "cert_file": bundle, "key_file": bundle},
            "static_configs": [{"targets": [target]}],
        }
        config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]}
        path = tmp_path / "prometheus.yml"
        path.write_text(yaml.safe_dump(config))
        api = f"127.0.0.1:{free_port()}"
        command = [
            program("prometheus"), f"--config.file={path}", f"--web.listen-address={api}",
            f"--storage.tsdb.path={tmp_path / 'tsdb'}",
        ]  # fmt: skip
        started.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        return api

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_prometheus_scrapes_with_a_readers_bundle(
    tmp_path: Path, certs: Certs, exposed: None, prometheus: Callable[[str], str]
) -> None:
    """One file for all three of its settings, as it was issued."""

    def is_up(api: str) -> bool:
        query = urllib.parse.urlencode({"query": 'up{job="loco"} == 1 and loco_round >= 0'})
        try:
            with urllib.request.urlopen(f"http://{api}/api/v1/query?{query}", timeout=5) as answer:
                return bool(json.load(answer)["data"]["result"])
        except OSError:
            return False  # not up yet

    async def look(_: Ask, address: str) -> bool:
        api = prometheus(address)
        return bool(await asyncio.to_thread(eventually, lambda: is_up(api), "it is scraped"))

    assert serve(tmp_path, look, certs)
