"""OpenTelemetry traces: a span for each HTTP request that used the engine, with child spans for
queue, prefill and decode.

Spans are made from a request's record when it is over: nothing is done while tokens are generated.
Attributes are named by the GenAI semantic conventions; none of them holds text. The OTEL_*
variables set where spans are sent. Needs the extra `otel`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace.core.errors import ConfigError
from headrace.core.version import install_extra
from headrace.server.observe.metrics import refusal_reason
from headrace.server.observe.record import HttpRecord, RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

FLUSH_S = 5.0  # at the end; a collector that does not answer must not delay the exit

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}


class Tracing:
    """A watcher of HTTP requests; `close` sends the remaining spans."""

    def __init__(self, provider: TracerProvider, model_name: str, version: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._model_name = model_name
        self._tracer: Tracer = provider.get_tracer("headrace", version)
        self._propagator = TraceContextTextMapPropagator()

    def on_http(self, record: HttpRecord) -> None:
        operation = _OPERATIONS.get(record.route)
        if operation is None:
            return
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        wall_ns = _to_wall_ns()
        carrier = {"traceparent": record.traceparent, "tracestate": record.tracestate}
        parent = self._propagator.extract({k: v for k, v in carrier.items() if v})
        span = self._tracer.start_span(
            f"{operation} {self._model_name}",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=wall_ns(record.arrived_s),
            attributes=self._attributes(operation, record),
        )
        if span.is_recording():
            if record.error is not None:
                span.set_attribute("error.type", refusal_reason(record.error))
            if record.status >= 500 or any(r.error for r in record.requests):
                span.set_status(StatusCode.ERROR)
            context = set_span_in_context(span)
            for request in record.requests:
                self._phases(request, context, wall_ns)
        span.end(wall_ns(record.ended_s))

    def close(self) -> None:
        self._provider.force_flush(int(FLUSH_S * 1000))
        self._provider.shutdown()

    def _attributes(self, operation: str, record: HttpRecord) -> dict[str, Any]:
        found: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "headrace",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "http.request.method": record.method,
            "http.route": record.route,
            "http.response.status_code": record.status,
            "headrace.request_id": record.request_id,
        }
        if record.key_name is not None:
            found["headrace.key"] = record.key_name
        requests = record.requests
        if not requests:
            return found
        found["gen_ai.usage.input_tokens"] = sum(r.prompt_tokens for r in requests)
        found["gen_ai.usage.output_tokens"] = sum(r.output_tokens for r in requests)
        found["gen_ai.usage.cache_read.input_tokens"] = sum(r.cached_tokens for r in requests)
        found["gen_ai.request.choice.count"] = requests[0].n
        found["gen_ai.response.finish_reasons"] = [r.finish_reason or "error" for r in requests]
        if requests[0].max_tokens is not None:
            found["gen_ai.request.max_tokens"] = requests[0].max_tokens
        if firsts := [r.first_token_s for r in requests if r.first_token_s is not None]:
            found["gen_ai.server.time_to_first_token"] = min(firsts) - record.arrived_s
        return found

    def _phases(
        self, request: RequestRecord, context: Any, wall_ns: Callable[[float], int]
    ) -> None:
        """Queue, prefill and decode, as far as reached; the last one ends with the request."""
        marks = [
            ("queue", request.arrived_s),
            ("prefill", request.started_s),
            ("decode", request.first_token_s),
        ]
        begun = [(name, start_s) for name, start_s in marks if start_s is not None]
        ends = [start_s for _, start_s in begun[1:]] + [request.ended_s or begun[-1][1]]
        for (name, start_s), end_s in zip(begun, ends, strict=True):
            span: Span = self._tracer.start_span(name, context=context, start_time=wall_ns(start_s))
            span.end(wall_ns(max(start_s, end_s)))


def start_tracing(model_name: str, version: str, exporter: SpanExporter | None = None) -> Tracing:
    """With the exporter that the OTEL_* variables name, unless one is given."""
    try:
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise _missing(error) from error
    # A name in OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES wins over ours.
    named = OTELResourceDetector().detect().attributes.get(SERVICE_NAME, "headrace")
    resource = Resource.create({SERVICE_NAME: named})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    if (exporter := exporter or _chosen_exporter()) is not None:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider, model_name, version)


def _chosen_exporter() -> SpanExporter | None:
    name = os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip() or "otlp"
    if name == "none":
        return None
    if name == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    if name != "otlp":
        raise ConfigError(
            f"OTEL_TRACES_EXPORTER is {name!r}; expected otlp, console or none.",
            "Send OTLP to a collector, which can pass it on in any format.",
            param="trace",
        )
    protocol = os.environ.get(
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
        os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
    )
    if protocol != "http/protobuf":
        raise ConfigError(
            f"The OTLP protocol is {protocol!r}; expected http/protobuf.",
            "Set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf and the collector's HTTP port (4318).",
            param="trace",
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise _missing(error) from error
    return OTLPSpanExporter()


def _missing(error: ImportError) -> ConfigError:
    return ConfigError(
        f"--trace needs {error.name or 'OpenTelemetry'}, which is not installed.",
        f"{install_extra('otel')}; or leave --trace off.",
        param="trace",
    )


def _to_wall_ns() -> Callable[[float], int]:
    """From time.monotonic() to nanoseconds since 1970: with one offset for all spans of a request,
    so that child spans lie within their parent."""
    offset_ns = time.time_ns() - time.monotonic_ns()
    return lambda monotonic_s: offset_ns + int(monotonic_s * 1e9)
