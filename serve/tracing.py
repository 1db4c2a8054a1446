"""OpenTelemetry's traces of requests: the wait for each batch, and each stage, below the spans of FastAPI.

They are sent where OTEL_EXPORTER_OTLP_ENDPOINT says; OpenTelemetry's other variables hold, too. FastAPI makes
a request a part of its client's trace (`traceparent`). Without the variable nothing is recorded.
"""

from __future__ import annotations

import os
import time

from opentelemetry import trace

from pipeline.config import BadInput

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_tracer = trace.get_tracer("polyrank.serve")


def install() -> None:
    """Sends the spans of this process where the environment says. Raises BadInput without the exporter."""
    named = [name for name in _ENDPOINTS if os.environ.get(name)]
    if not named:
        return
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise BadInput(f"{named[0]}: needs an exporter: pip install -e '.[tracing]'") from None
    service = os.environ.get("OTEL_SERVICE_NAME", "polyrank")
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


def tag(**attributes: str) -> None:
    """Adds attributes to the span of the current request."""
    trace.get_current_span().set_attributes(
        {f"polyrank.{key}": value for key, value in attributes.items()}
    )


def record(name: str, began: float, ended: float, **attributes: str | int | float) -> None:
    """Records a part of the current request, of two times of `time.monotonic`."""
    if not trace.get_current_span().is_recording():
        return
    offset = time.time() - time.monotonic()
    span = _tracer.start_span(name, start_time=_ns(began + offset), attributes=attributes)
    span.end(_ns(ended + offset))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
