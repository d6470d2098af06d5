"""A run as the JSON that `vllm bench serve --save-result` writes, so that others' tools read it.

The keys are those of vLLM's own source, vllm/benchmarks/serve.py. What it has no key for stands
below `headrace`. A percentile that the number of requests can't give is null.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from headrace.bench.interval import Estimate
from headrace.bench.summary import Spread, Summary

SCHEMA = 1
_TIMES = ("ttft", "tpot", "itl", "e2el")
_OWN = ("visible", "chunk_gap", "service_ttft", "service_e2el")


def result(
    summary: Summary, about: Mapping[str, Any], *, date: datetime, detailed: bool
) -> dict[str, Any]:
    """`about`: model_id, request_rate, max_concurrency and so on, as vLLM names them."""
    good = summary.good
    found: dict[str, Any] = {
        "date": date.strftime("%Y%m%d-%H%M%S"),
        "backend": "openai-chat",
        "endpoint_type": "openai-chat",
        "label": None,
        "tokenizer_id": None,
        **about,
        "num_prompts": len(summary.records),
        "duration": summary.wall_s,
        "completed": len(good),
        "failed": len(summary.records) - len(good),
        "total_input_tokens": summary.input_tokens,
        "total_output_tokens": summary.output_tokens,
        "request_throughput": summary.requests_s,
        "request_goodput": summary.goodput_s,
        "output_throughput": summary.output_tokens_s,
        "total_token_throughput": summary.total_tokens_s,
        "max_output_tokens_per_s": summary.most_tokens_in_a_second,
        "max_concurrent_requests": summary.most_at_once,
    }
    for name in _TIMES:
        found |= _times(name, summary.spreads[name])
    if detailed:
        found |= _details(summary)
    found["headrace"] = own_facts(summary)
    return found


def _times(name: str, spread: Spread | None) -> dict[str, Any]:
    if spread is None:
        return {}
    found: dict[str, Any] = {
        f"mean_{name}_ms": spread.mean * 1e3,
        f"median_{name}_ms": spread.median * 1e3,
        f"std_{name}_ms": spread.deviation * 1e3,
    }
    for share, estimate in spread.percentiles.items():
        if share != 0.5:
            value = None if estimate is None else estimate.value * 1e3
            found[f"p{share * 100:g}_{name}_ms"] = value
    return found


def _details(summary: Summary) -> dict[str, Any]:
    """One entry a request, failed ones too, in order of their scheduled times."""
    records = summary.records
    return {
        "input_lens": [one.prompt_tokens for one in records],
        "output_lens": [one.tokens if one.is_good else 0 for one in records],
        "ttfts": [one.ttft_s if one.is_good else 0.0 for one in records],
        "itls": [one.gaps_s if one.is_good else [] for one in records],
        "start_times": [one.scheduled_s for one in records],
        "generated_texts": ["".join(one.answer.text) for one in records],
        "errors": ["" if one.is_good else f"{one.answer.failure}: {one.answer.detail}"
                   for one in records],
        "e2els": [one.e2e_s if one.is_good else 0.0 for one in records],
        "service_ttfts": [one.service_ttft_s if one.is_good else 0.0 for one in records],
    }  # fmt: skip


def own_facts(summary: Summary) -> dict[str, Any]:
    """Intervals, service times, the client's health, failures by cause."""
    health = summary.health
    return {
        "schema": SCHEMA,
        "is_valid": health.is_valid,
        "invalid_because": list(health.wrong),
        "client": {
            "event_loop_lag_p99_s": health.lag_p99_s,
            "dispatch_delay_p50_s": health.late_p50_s,
            "dispatch_delay_p99_s": health.late_p99_s,
            "cpu_share": health.cpu_share,
        },
        "failures": summary.failures,
        "failures_said": summary.failures_said,
        "rate_limited": summary.rate_limited,
        "tokens_counted_by": {str(key): count for key, count in summary.counted_by.items()},
        "tokens_disagreed": summary.disagreed,
        "cached_share": summary.cached_share,
        "slo": None
        if summary.slo is None
        else {
            "objective": str(summary.slo),
            "met_share": summary.met_share,
            "is_met": summary.is_met,
        },
        "output_throughput_interval": _interval(summary.output_rate),
        "times_s": {
            name: None if spread is None else _facts(spread)
            for name in (*_TIMES, *_OWN)
            for spread in (summary.spreads[name],)
        },
        "notes": list(summary.notes),
    }


def _facts(spread: Spread) -> dict[str, Any]:
    return {
        "count": spread.count,
        "mean": spread.mean,
        "median": spread.median,
        "percentiles": {
            f"p{share * 100:g}": None
            if found is None
            else {"value": found.value, "low": found.low, "high": found.high}
            for share, found in spread.percentiles.items()
        },
    }


def _interval(found: Estimate | None) -> list[float] | None:
    return None if found is None else [found.low, found.high]
