"""The web server at the metrics address, over real HTTP: documents, probes, headers, bad requests.

pytest tests/coordinator/test_web.py
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import socket
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.certs import Certs
from support.play import Play, playing
from support.runs import config_of, create_store

from coordinator import door
from coordinator.audit import Audit
from coordinator.report import write_report
from coordinator.web import PAGE, Pages, web_server
from loco.errors import ConfigError

T = TypeVar("T")


def served(address: str, play: Play) -> AbstractAsyncContextManager[Pages]:
    audit = Audit(play.store.directory)  # nobody is refused: it opens no file
    return web_server(address, play.monitor, lambda: play.state, audit)


def serve(tmp_path: Path, look: Callable[[aiohttp.ClientSession, Pages, Play], Awaitable[T]]) -> T:
    """Serve a played run of one round and look at it."""
    with playing(create_store(tmp_path, config_of(quorum={"min_sites": 1}))) as play:
        play.join("paris")
        play.push("paris")

        async def main() -> T:
            async with served("127.0.0.1:0", play) as pages:
                address = (play.store.directory / "web-address").read_text()
                async with aiohttp.ClientSession(f"http://{address}") as session:
                    return await look(session, pages, play)

        return asyncio.run(main())


def fetch(tmp_path: Path, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one request."""

    async def look(session: aiohttp.ClientSession, *_: object) -> tuple[int, dict[str, str], bytes]:
        wanted = {"Accept-Encoding": "identity", **headers}
        async with session.get(path, headers=wanted, auto_decompress=False) as answer:
            return answer.status, dict(answer.headers), await answer.read()

    return serve(tmp_path, look)


@pytest.mark.parametrize("secured", [False, True])
def test_strangers_take_no_more_connections_than_there_are(
    secured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who say nothing, not even of TLS, count; when they have gone, others are let in."""
    monkeypatch.setattr(door, "MOST_CONNECTIONS", 5)
    certs = Certs(tmp_path / "certs") if secured else None

    async def silent(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", port)

    async def hung_up_on(reader: asyncio.StreamReader) -> bool:
        try:
            return await asyncio.wait_for(reader.read(1), 0.5) == b""
        except TimeoutError:
            return False

    async def healthy(port: int) -> bool:
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(
                    f"http{'s' if secured else ''}://127.0.0.1:{port}/healthz", ssl=False
                ) as answer,
            ):
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    async def main(play: Play) -> None:
        # 0.0.0.0: on loopback alone it speaks plaintext
        keys = None if certs is None else certs.keys()
        audit = Audit(play.store.directory)
        async with web_server("0.0.0.0:0", play.monitor, lambda: play.state, audit, keys):
            address = (play.store.directory / "web-address").read_text()
            port = int(address.rpartition(":")[2])
            assert await healthy(port)
            held = [await silent(port) for _ in range(8)]
            assert [await hung_up_on(reader) for reader, _ in held] == [False] * 5 + [True] * 3
            assert not await healthy(port)
            for _, writer in held:
                writer.close()
            for _ in range(100):
                if await healthy(port):
                    break
                await asyncio.sleep(0.05)
            assert await healthy(port)

    with playing(create_store(tmp_path, config_of(quorum={"min_sites": 1}))) as play:
        asyncio.run(main(play))


def test_status_is_the_document_that_the_monitor_gives(tmp_path: Path) -> None:
    async def look(session: aiohttp.ClientSession, _: Pages, play: Play) -> None:
        async with session.get("/status.json") as answer:
            assert await answer.json() == play.monitor.status(play.state)

    serve(tmp_path, look)


def test_metrics_are_what_prometheus_reads(tmp_path: Path) -> None:
    status, headers, body = fetch(tmp_path, "/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=")
    families = {family.name for family in text_string_to_metric_families(body.decode())}
    assert {"loco_round", "loco_rounds", "process_resident_memory_bytes"} <= families


def test_ready_only_while_sites_can_join_healthy_all_the_time(tmp_path: Path) -> None:
    async def look(session: aiohttp.ClientSession, pages: Pages, _: Play) -> list[int]:
        seen = []
        for ready in (False, True, False):
            pages.ready = ready
            for path in ("/healthz", "/readyz"):
                async with session.get(path) as answer:
                    seen.append(answer.status)
        return seen

    assert serve(tmp_path, look) == [200, 503, 200, 200, 200, 503]


@pytest.mark.parametrize("path", ["/", "/page.js", "/status.json", "/metrics", "/nothing"])
def test_every_answer_has_the_security_headers(tmp_path: Path, path: str) -> None:
    _, headers, _ = fetch(tmp_path, path)
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Referrer-Policy"] == "no-referrer"


def test_the_page_has_no_inline_script_and_no_foreign_address() -> None:
    html = PAGE.joinpath("index.html").read_text(encoding="utf-8")
    assert re.findall(r"<script(?![^>]* src=)", html) == []
    assert re.findall(r"\son\w+=|style=|javascript:", html) == []
    for name in ("index.html", "page.css", "page.js", "charts.js"):
        assert "//" not in re.sub(r"^\s*//.*|\s// .*", "", _text(name), flags=re.MULTILINE), name


def _text(name: str) -> str:
    return PAGE.joinpath(name).read_text(encoding="utf-8")


def test_vendored_uplot_comes_with_its_licence() -> None:
    assert "v1.6.32" in _text("uPlot.js")[:200]
    assert "MIT License" in _text("uPlot.LICENSE.txt")


def test_what_the_page_loads_is_served(tmp_path: Path) -> None:
    wanted = re.findall(r'(?:src|href)="([\w.]+)"', _text("index.html"))
    assert "page.js" in wanted

    async def look(session: aiohttp.ClientSession, *_: object) -> list[int]:
        answers = []
        for path in wanted:
            async with session.get(f"/{path}") as answer:
                answers.append(answer.status)
        return answers

    assert set(serve(tmp_path, look)) == {200}


def test_documents_are_compressed_where_the_client_can(tmp_path: Path) -> None:
    _, headers, body = fetch(tmp_path, "/status.json", **{"Accept-Encoding": "gzip"})
    assert headers["Content-Encoding"] == "gzip"
    assert json.loads(gzip.decompress(body))["run_id"] == "test-run"


def test_history_since_a_round(tmp_path: Path) -> None:
    _, _, body = fetch(tmp_path, "/history.json?since=1")
    document: dict[str, Any] = json.loads(body)
    assert (document["first_round"], document["num_rounds"]) == (1, 1)


@pytest.mark.parametrize("since", ["x", "-1", "1e99", "nan"])
@pytest.mark.parametrize("path", ["/history.json", "/timeline.json"])
def test_an_impossible_since_is_refused_in_words(tmp_path: Path, path: str, since: str) -> None:
    status, _, body = fetch(tmp_path, f"{path}?since={since}")
    assert status == 400
    assert f"since='{since}' is not possible" in body.decode()


@pytest.mark.parametrize("path", ["/../server.py", "/%2e%2e/server.py", "/report.html", "/page/"])
def test_nothing_else_is_served(tmp_path: Path, path: str) -> None:
    assert fetch(tmp_path, path)[0] == 404


def test_nothing_can_be_posted(tmp_path: Path) -> None:
    async def look(session: aiohttp.ClientSession, *_: object) -> int:
        async with session.post("/status.json", data=b"x") as answer:
            return answer.status

    assert serve(tmp_path, look) == 405


def test_a_port_in_use_is_said_with_the_way_out(tmp_path: Path) -> None:
    with socket.socket() as taken, playing(create_store(tmp_path, config_of())) as play:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"

        async def main() -> None:
            async with served(address, play):
                raise AssertionError("it listens on a port in use")

        with pytest.raises(ConfigError, match=r"in use; give another --metrics"):
            asyncio.run(main())


# --- loco report --------------------------------------------------------------------------------


def test_report_is_one_file_and_names_the_run(tmp_path: Path) -> None:
    with playing(create_store(tmp_path, config_of(quorum={"min_sites": 1}))) as play:
        play.join("paris")
        play.push("paris")
    write_report(tmp_path, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert re.findall(r'(?:src|href)="', text) == []
    (embedded,) = re.findall(r'<script type="application/json" id="report">(.*)</script>', text)
    document = json.loads(embedded)
    assert document["run_id"] == "test-run"
    assert document["committed_rounds"] == 1
    assert document["history"]["sites"]["paris"]["contribution_bytes"][0] == 1000


def test_report_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        write_report(tmp_path, tmp_path / "report.html")


def test_report_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with playing(create_store(tmp_path, config_of())):
        pass
    with pytest.raises(ConfigError, match="cannot write"):
        write_report(tmp_path, tmp_path / "missing" / "report.html")


def test_a_damaged_history_does_not_keep_a_run_from_starting(tmp_path: Path) -> None:
    store = create_store(tmp_path, config_of())
    (tmp_path / "history.sqlite").write_bytes(b"not a database, but long enough to be read as one")
    with playing(store) as play:
        assert play.monitor.history.document(0)["num_rounds"] == 1
    assert (tmp_path / "history.damaged").exists()


def test_report_with_a_broken_history_says_how_to_go_on(tmp_path: Path) -> None:
    with playing(create_store(tmp_path, config_of())):
        pass
    (tmp_path / "history.sqlite").write_bytes(b"not a database, but long enough to be read as one")
    with pytest.raises(ConfigError, match="remove it to begin anew"):
        write_report(tmp_path, tmp_path / "report.html")
