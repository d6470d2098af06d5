"""Traces: what OpenTelemetry's own in-memory exporter got."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

from headrace.core.errors import ConfigError, UnavailableError
from headrace.server.observe.record import HttpRecord, RequestRecord

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from headrace.server.observe.tracing import start_tracing

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"


def exported(*records: HttpRecord) -> list[ReadableSpan]:
    exporter = InMemorySpanExporter()
    tracing = start_tracing("tiny", "1.2.3", exporter)
    for record in records:
        tracing.on_http(record)
    tracing._provider.force_flush()
    spans = list(exporter.get_finished_spans())
    tracing.close()
    return spans


def http(**fields: Any) -> HttpRecord:
    now_s = time.monotonic()
    defaults: dict[str, Any] = {
        "request_id": "req-1",
        "method": "POST",
        "route": "/v1/chat/completions",
        "status": 200,
        "arrived_s": now_s - 3.0,
        "ended_s": now_s,
    }
    return HttpRecord(**{**defaults, **fields})


def request(of: HttpRecord, **fields: Any) -> RequestRecord:
    defaults: dict[str, Any] = {
        "request_id": of.request_id,
        "endpoint": of.route,
        "arrived_s": of.arrived_s,
        "prompt_tokens": 9,
        "cached_tokens": 4,
        "max_tokens": 64,
        "output_tokens": 3,
        "started_s": of.arrived_s + 0.5,
        "first_token_s": of.arrived_s + 1.0,
        "last_token_s": of.arrived_s + 2.0,
        "ended_s": of.ended_s,
        "finish_reason": "stop",
        "prompt": "a secret",
        "answer": "a secret",
    }
    return RequestRecord(**{**defaults, **fields})


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_a_request_is_a_span_with_its_phases_below_it() -> None:
    record = http(traceparent=f"00-{TRACE_ID}-{PARENT_ID}-01", tracestate="a=b")
    record.requests.append(request(record))
    spans = exported(record)
    (server,) = [span for span in spans if span.kind is SpanKind.SERVER]
    assert server.name == "chat tiny"
    assert server.parent is not None
    assert f"{server.parent.trace_id:032x}" == TRACE_ID
    assert f"{server.parent.span_id:016x}" == PARENT_ID
    assert server.context.trace_state.get("a") == "b"
    assert seconds(server) == pytest.approx(3.0, abs=1e-3)
    assert server.start_time == pytest.approx(time.time_ns() - 3e9, abs=60e9)  # the wall's time
    below = {span.name: span for span in spans if span is not server}
    assert {name: pytest.approx(seconds(s), abs=1e-3) for name, s in below.items()} == {
        "queue": 0.5,
        "prefill": 0.5,
        "decode": 2.0,
    }
    for span in below.values():
        assert span.parent is not None
        assert span.parent.span_id == server.context.span_id
    assert below["queue"].start_time == server.start_time
    assert below["decode"].end_time == server.end_time
    found = dict(server.attributes or {})
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.request.model"] == "tiny"
    assert found["gen_ai.request.max_tokens"] == 64
    assert found["gen_ai.usage.input_tokens"] == 9
    assert found["gen_ai.usage.output_tokens"] == 3
    assert found["gen_ai.response.finish_reasons"] == ("stop",)
    assert found["http.response.status_code"] == 200
    assert server.status.status_code is StatusCode.UNSET
    assert server.resource.attributes["service.name"] == "headrace"
    assert "secret" not in "".join(span.to_json() for span in spans)


def test_one_that_never_left_the_queue() -> None:
    record = http(status=503, error=UnavailableError("it died", retry_after_s=1))
    never = {"started_s": None, "first_token_s": None, "last_token_s": None, "output_tokens": 0}
    record.requests.append(request(record, **never, finish_reason="error", error="it died"))
    server, queue = sorted(exported(record), key=lambda span: span.kind is not SpanKind.SERVER)
    assert queue.name == "queue"
    assert seconds(queue) == pytest.approx(3.0, abs=1e-3)
    assert server.status.status_code is StatusCode.ERROR
    assert (server.attributes or {})["error.type"] == "unavailable"


def test_bad_parents_are_ignored_and_probes_are_no_spans() -> None:
    (span,) = exported(http(traceparent="00-zz\r\n-01"), http(route="/health"), http(route="other"))
    assert span.parent is None


def test_the_resource_is_what_the_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "rivers")
    (span,) = exported(http())
    assert span.resource.attributes["service.name"] == "rivers"


def test_sampling_is_what_the_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    assert exported(http()) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("OTEL_TRACES_EXPORTER", "zipkin"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")],
)
def test_exporters_that_there_are_not(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=value):
        start_tracing("tiny", "1.2.3")


def test_without_the_extra_it_says_what_to_install() -> None:
    script = (
        "import sys; sys.modules['opentelemetry.sdk.resources'] = None\n"
        "from headrace.server.observe.tracing import start_tracing\n"
        "start_tracing('tiny', '1')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert ".[otel]" in done.stderr
