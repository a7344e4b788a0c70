"""OpenTelemetry: one trace a round, over the coordinator and all sites. Optional (extra `tracing`).

The root span is the round, from opened to committed; below it are the reduction and every phase of
every site. Sites need no exporter: the coordinator makes their spans from what heartbeats tell. It
is on where the standard variable OTEL_EXPORTER_OTLP_ENDPOINT is set.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import TYPE_CHECKING

from coordinator.told import Span
from loco.errors import ConfigError, install_extra

if TYPE_CHECKING:
    from opentelemetry.trace import Span as TraceSpan

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_OPEN_ROUNDS = 32  # reports of a site come after its round has closed


class RoundTraces:
    """Makes the spans and hands them to the exporter's own thread."""

    def __init__(self, run_id: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"{ENDPOINT} is set, but OpenTelemetry is not installed ({error}): "
                f"{install_extra('tracing')}, or unset it"
            ) from error
        resource = Resource.create({"service.name": "loco", "loco.run_id": run_id})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("loco")
        self._rounds: OrderedDict[int, TraceSpan] = OrderedDict()

    def opened(self, round_: int, at: float) -> None:
        """Begin the trace of a round; `at` in Unix seconds."""
        attributes = {"loco.round": round_}
        span = self._tracer.start_span(
            f"round {round_}", attributes=attributes, start_time=_nanoseconds(at)
        )
        self._rounds[round_] = span
        if len(self._rounds) > _OPEN_ROUNDS:
            self._rounds.popitem(last=False)

    def committed(self, round_: int, closed_at: float, at: float) -> None:
        """End the round, and tell how long the reduction took."""
        if round_ in self._rounds:
            self._child(round_, "reduce", closed_at, at, {})
            self._rounds[round_].end(_nanoseconds(at))

    def phase(self, site: str, span: Span) -> None:
        """A phase of a site; one of a round that this process did not see open is left out."""
        if span.round in self._rounds:
            end = span.started_at + span.seconds
            self._child(span.round, span.phase, span.started_at, end, {"loco.site": site})

    def _child(
        self, round_: int, name: str, start: float, end: float, attributes: dict[str, str]
    ) -> None:
        from opentelemetry.trace import set_span_in_context

        child = self._tracer.start_span(
            name,
            context=set_span_in_context(self._rounds[round_]),
            attributes=attributes,
            start_time=_nanoseconds(start),
        )
        child.end(_nanoseconds(end))

    def close(self) -> None:
        """Send what is left; takes as long as the exporter's time-out when nobody answers."""
        self._provider.shutdown()


def traces_if_wanted(run_id: str) -> RoundTraces | None:
    """None unless the environment names an endpoint."""
    return RoundTraces(run_id) if os.environ.get(ENDPOINT) else None


def _nanoseconds(at: float) -> int:
    return int(at * 1e9)
