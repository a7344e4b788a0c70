"""Traces of rounds, sent with the real exporter to a receiver that decodes them.

pytest tests/coordinator/test_tracing.py
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from support.play import playing
from support.runs import config_of, create_store

from coordinator.tracing import ENDPOINT, traces_if_wanted
from loco.wire.v1 import coordinator_pb2 as pb


class Receiver(HTTPServer):
    """Takes OTLP over HTTP and keeps the spans."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Span] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.server.spans.extend(scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_round_is_one_trace_over_coordinator_and_sites(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENDPOINT, receiver.url)
    with playing(create_store(tmp_path, config_of(quorum={"min_sites": 1}))) as play:
        play.join("paris")
        opened = play.now
        play.now += 30
        play.push("paris")
        spans = [
            pb.PhaseSpan(phase=pb.SITE_PHASE_COMPUTE, round=0, seconds=20, ended_ago_seconds=5),
            pb.PhaseSpan(phase=pb.SITE_PHASE_PUSH, round=0, seconds=5),
        ]
        play.beat("paris", round=1, spans=spans)  # after the round was committed
    by_name = {span.name: span for span in receiver.spans}
    root = by_name["round 0"]
    assert root.start_time_unix_nano == int(opened * 1e9)
    assert root.end_time_unix_nano == int((opened + 30) * 1e9)
    for name in ("reduce", "compute", "push"):
        assert by_name[name].trace_id == root.trace_id
        assert by_name[name].parent_span_id == root.span_id
    compute = by_name["compute"]
    assert compute.start_time_unix_nano == int((opened + 5) * 1e9)
    assert compute.end_time_unix_nano == int((opened + 25) * 1e9)
    assert {a.key: a.value.string_value for a in compute.attributes} == {"loco.site": "paris"}


def test_without_an_endpoint_there_are_no_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENDPOINT, raising=False)
    assert traces_if_wanted("run") is None
