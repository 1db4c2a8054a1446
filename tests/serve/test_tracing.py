"""Traces as a collector gets them: OpenTelemetry's own exporter, and a server that takes its protobuf."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from fastapi.testclient import TestClient
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from pipeline.config import BadInput
from serve import tracing
from serve.http import api

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The spans that reach a collector, after `trace.get_tracer_provider().shutdown()`."""
    spans: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding"):
                raise AssertionError("no compression was asked for")
            sent = ExportTraceServiceRequest.FromString(body)
            for resource in sent.resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            """Says nothing."""

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    # The process has one provider, which is set once: tests of other modules have none.
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER_SET_ONCE", trace.Once())
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    try:
        tracing.install()
        monkeypatch.setattr(tracing, "_tracer", trace.get_tracer("polyrank.serve"))
        yield spans
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_request_has_its_stages_in_the_clients_trace(collected, tiny_ranker, tiny_pool, asking):
    model = tiny_ranker("poly")
    client = TestClient(api.create_app(asking(model, tiny_pool(model)).service))
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    asked = {"context": "hello there", "pool": "replies"}
    assert client.post("/rank", json=asked, headers=headers).status_code == 200
    trace.get_tracer_provider().shutdown()  # type: ignore[attr-defined]
    assert {span.trace_id.hex() for span in collected} == {TRACE}
    (request,) = [span for span in collected if span.parent_span_id.hex() == PARENT]
    assert request.name == "POST /rank"
    ids = {span.span_id: span for span in collected}
    parts = [span for span in collected if span.name in ("tokenize", "queue", "contexts", "search")]
    (endpoint,) = {span.parent_span_id for span in parts}
    said = {pair.key: pair.value.string_value for pair in ids[endpoint].attributes}
    assert (
        said.items() >= {"polyrank.request_id": "mine", "polyrank.model": model.fingerprint}.items()
    )
    assert [span.name for span in sorted(parts, key=lambda span: span.start_time_unix_nano)] == [
        "tokenize", "queue", "contexts", "queue", "search",
    ]  # fmt: skip
    for span in parts:
        assert request.start_time_unix_nano - 5e6 <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= request.end_time_unix_nano + 5e6


def test_nothing_is_recorded_without_the_variable(monkeypatch):
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    tracing.install()
    assert not tracing._tracer.start_span("queue").is_recording()


def test_a_missing_exporter_is_named(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(
        BadInput, match=r"OTEL_EXPORTER_OTLP_ENDPOINT: needs an exporter.*\[tracing\]"
    ):
        tracing.install()
