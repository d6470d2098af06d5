"""A run in AIPerf's forms: profile_export.jsonl (a line a request) and profile_export_aiperf.csv.

Names and units are those of the source of AIPerf's CSV exporter and of its page on profile exports.
Its `inter_token_latency` is what others call TPOT; its `inter_chunk_latency` lists the gaps between
chunks. Latencies count from the scheduled time, as everywhere here.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from headrace.bench.interval import least_count, quantile
from headrace.bench.record import Record
from headrace.bench.summary import Summary

_SHARES = (0.01, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99)
_CODES = {"rate limited (429)": 429, "timeout": 408}


def write_records(summary: Summary, path: Path, *, began_unix_s: float) -> int:
    """One line a request, failed ones too; returns how many."""
    with path.open("w", encoding="utf-8") as file:
        for number, record in enumerate(summary.records):
            file.write(json.dumps(_row(number, record, began_unix_s)) + "\n")
    return len(summary.records)


def _row(number: int, record: Record, began_unix_s: float) -> dict[str, Any]:
    def ns(at_s: float) -> int:
        return round((began_unix_s + at_s) * 1e9)

    session = record.ask.session
    metadata = {
        "session_num": number if session is None else session,
        "x_request_id": f"request-{number}",
        "x_correlation_id": f"session-{number if session is None else session}",
        "conversation_id": f"session-{number if session is None else session}",
        "turn_index": record.ask.turn,
        "request_start_ns": ns(record.scheduled_s),
        "request_ack_ns": ns(record.first_s) if record.is_good else None,
        "request_end_ns": ns(record.last_s if record.is_good else record.end_s),
        "worker_id": "headrace",
        "record_processor_id": "headrace",
        "benchmark_phase": "profiling",
        "was_cancelled": False,
        "cancellation_time_ns": None,
    }
    if not record.is_good:
        answer = record.answer
        head = answer.detail[:3]
        code = int(head) if head.isdigit() else _CODES.get(str(answer.failure))
        error = {"code": code, "type": str(answer.failure), "message": answer.detail}
        asked = {"error_isl": _value(record.ask.prompt_tokens, "tokens")}
        return {"metadata": metadata, "metrics": asked, "error": error}
    return {"metadata": metadata, "metrics": _metrics(record), "error": None}


def _metrics(record: Record) -> dict[str, Any]:
    found = {
        "input_sequence_length": _value(record.prompt_tokens, "tokens"),
        "time_to_first_token": _value(record.ttft_s * 1e3, "ms"),
        "request_latency": _value(record.e2e_s * 1e3, "ms"),
        "output_token_count": _value(
            record.tokens - (record.answer.reasoning_tokens or 0), "tokens"
        ),
        "output_sequence_length": _value(record.tokens, "tokens"),
        "inter_chunk_latency": _value([gap * 1e3 for gap in record.chunk_gaps_s], "ms"),
    }
    if record.visible_s is not None:
        found["time_to_first_output_token"] = _value(record.visible_s * 1e3, "ms")
    if record.answer.reasoning_tokens is not None:
        found["reasoning_token_count"] = _value(record.answer.reasoning_tokens, "tokens")
    if record.tpot_s is not None:
        found["inter_token_latency"] = _value(record.tpot_s * 1e3, "ms")
        if record.tpot_s > 0:
            rate = _value(1 / record.tpot_s, "tokens/sec/user")
            found["output_token_throughput_per_user"] = rate
    return found


def _value(value: object, unit: str) -> dict[str, object]:
    return {"value": value, "unit": unit}


def write_table(summary: Summary, file: TextIO) -> None:
    """Two sections: metrics with percentiles, then single values. What was refused is empty."""
    good = summary.good
    rows: tuple[tuple[str, list[float]], ...] = (
        ("Input Sequence Length (tokens)", [float(one.prompt_tokens) for one in good]),
        ("Inter Token Latency (ms)", [v * 1e3 for one in good if (v := one.tpot_s) is not None]),
        ("Output Sequence Length (tokens)", [float(one.tokens) for one in good]),
        ("Request Latency (ms)", [one.e2e_s * 1e3 for one in good]),
        ("Time to First Token (ms)", [one.ttft_s * 1e3 for one in good]),
    )
    writer = csv.writer(file)
    names = [f"p{share * 100:g}" for share in _SHARES]
    writer.writerow(["Metric", "avg", "min", "max", *names, "std"])
    for name, values in rows:
        if values:
            writer.writerow([name, *(f"{v:.2f}" if v is not None else "" for v in _stats(values))])
    writer.writerow([])
    writer.writerow(["Metric", "Value"])
    for name, value in (
        ("Benchmark Duration (sec)", summary.wall_s),
        ("Error Request Count", float(len(summary.records) - len(good))),
        ("Output Token Throughput (tokens/sec)", summary.output_tokens_s),
        ("Request Count", float(len(good))),
        ("Request Throughput (requests/sec)", summary.requests_s),
        ("Total Token Throughput (tokens/sec)", summary.total_tokens_s),
    ):
        writer.writerow([name, f"{value:.2f}"])


def _stats(values: Sequence[float]) -> list[float | None]:
    ordered = sorted(values)
    middle = math.fsum(ordered) / len(ordered)
    deviation = math.sqrt(math.fsum((v - middle) ** 2 for v in ordered) / len(ordered))
    percentiles = [
        quantile(ordered, share) if len(ordered) >= least_count(max(share, 1 - share)) else None
        for share in _SHARES
    ]
    return [middle, ordered[0], ordered[-1], *percentiles, deviation]
