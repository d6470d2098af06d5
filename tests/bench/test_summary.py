"""A run in figures, from records whose figures are known."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.health import judge
from headrace.bench.record import Record
from headrace.bench.summary import Summary, is_narrow, summarize
from headrace.bench.table import lines
from headrace.bench.vllm_result import result
from headrace.client.answer import Answer, Failure
from headrace.search.measured import read_measured
from headrace.workload.ask import Ask
from headrace.workload.slo import Slo


def whole(at_s: float, *, ttft_s: float = 0.2, tokens: int = 5, gap_s: float = 0.05) -> Record:
    times = [at_s + ttft_s + gap_s * n for n in range(tokens)]
    answer = Answer(times_s=times, chars=[1] * tokens, counts=[0] * tokens, text=["a"] * tokens,
                    visible_s=times[0], prompt_tokens=100, output_tokens=tokens,
                    finish="length")  # fmt: skip
    ask = Ask(at_s=at_s, prompt_tokens=90, output_tokens=tokens)
    return Record(ask=ask, scheduled_s=at_s, began_s=at_s, sent_s=at_s, answer=answer)


def failed(at_s: float, failure: Failure, detail: str = "") -> Record:
    ask = Ask(at_s=at_s, prompt_tokens=90, output_tokens=5)
    one = Record(ask=ask, scheduled_s=at_s, began_s=at_s, sent_s=at_s)
    one.answer.fail(failure, detail)
    return one


def summary_of(records: list[Record], **more: Any) -> Summary:
    return summarize(records, lags_s=[0.0], cpu_share=0.1, **more)


def test_the_aggregate_is_tokens_by_wall_clock() -> None:
    """Two streams of 4 s that overlap by half: 6 s, 40 tokens. A mean of their rates says 10."""
    found = summary_of([whole(0.0, ttft_s=0.4, tokens=20, gap_s=3.6 / 19),
                        whole(2.0, ttft_s=0.4, tokens=20, gap_s=3.6 / 19)])  # fmt: skip
    assert found.wall_s == pytest.approx(6.0)
    assert found.output_tokens_s == pytest.approx(40 / 6)
    assert found.total_tokens_s == pytest.approx(240 / 6)


def test_failures_stand_apart_and_have_no_latency() -> None:
    records = [
        whole(0.0), failed(0.1, Failure.RATE_LIMITED), failed(0.2, Failure.HTTP, "503: busy"),
        failed(0.3, Failure.HTTP, "503: busy"), failed(0.4, Failure.IN_STREAM),
    ]  # fmt: skip
    found = summary_of(records, slo=Slo(ttft_s=1.0))
    assert found.failures == {
        "HTTP 503": 2, "rate limited (429)": 1, "error in the stream": 1,
    }  # fmt: skip
    spread = found.spreads["ttft"]
    assert spread is not None
    assert (spread.count, found.rate_limited) == (1, 1)
    assert found.met_share == pytest.approx(0.2)  # a failed request has missed
    assert not found.is_met


def test_goodput_counts_requests_within_the_objective() -> None:
    records = [whole(0.0, ttft_s=0.1), whole(1.0, ttft_s=0.9), whole(1.8, gap_s=0.2 / 4)]
    found = summary_of(records, slo=Slo(ttft_s=0.5))
    assert found.wall_s == pytest.approx(2.2)
    assert found.goodput_s == pytest.approx(2 / 2.2)


def test_a_late_client_makes_the_run_invalid_by_itself() -> None:
    assert judge([0.0], [0.0] * 99 + [0.001], 0.2, 0.01).is_valid
    late = judge([0.0], [0.03] * 100, 0.2, 0.2)  # 30 ms late where TTFT is 200 ms
    assert not late.is_valid
    assert "30.0 ms late" in late.wrong[0]
    assert judge([0.0], [0.03] * 100, 0.2, 2.0).is_valid  # where it is 2 s, that is little
    assert "event loop" in judge([0.5] * 100, [0.0], 0.2, 1.0).wrong[0]
    assert "95% of a core" in judge([0.0], [0.0], 0.95, 1.0).wrong[0]
    one = whole(0.0)
    one.began_s = 0.19
    found = summary_of([one] * 3)
    assert not found.health.is_valid
    assert next(iter(lines(found))).startswith("INVALID")


def test_the_file_has_the_keys_of_vllm_and_is_read_by_cost(tmp_path: Path) -> None:
    """The keys are those of vllm/benchmarks/serve.py, with --save-detailed."""
    records = [whole(0.1 * n) for n in range(40)] + [failed(4.0, Failure.RESET)]
    found = result(
        summary_of(records, slo=Slo(ttft_s=0.1), most_at_once=8),
        {"model_id": "m", "request_rate": "inf", "burstiness": 1.0, "max_concurrency": 8},
        date=datetime(2026, 11, 16, tzinfo=UTC),
        detailed=True,
    )
    expected = {
        "date", "backend", "endpoint_type", "label", "model_id", "tokenizer_id", "num_prompts",
        "request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed",
        "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput",
        "output_throughput", "total_token_throughput", "input_lens", "output_lens", "ttfts",
        "itls", "start_times", "generated_texts", "errors", "max_output_tokens_per_s",
        "max_concurrent_requests",
        *(f"{kind}_{time}_ms" for kind in ("mean", "median", "std", "p99")
          for time in ("ttft", "tpot", "itl", "e2el")),
    }  # fmt: skip
    assert expected <= found.keys()
    assert found["p99_ttft_ms"] is None  # refused: 40 requests
    assert found["median_ttft_ms"] == pytest.approx(200.0)
    assert found["p90_tpot_ms"] == pytest.approx(50.0)
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (40, 1, 200)
    assert {len(found[name]) for name in ("ttfts", "itls", "errors", "input_lens")} == {41}
    assert found["errors"][-1] == "connection lost: "
    assert found["request_goodput"] == 0.0
    path = tmp_path / "result.json"
    path.write_text(json.dumps(found))
    measured = read_measured(path)
    assert measured.output_tokens_s == pytest.approx(200 / found["duration"])
    assert (measured.mix.input_tokens, measured.mix.output_tokens) == (100.0, 5.0)


def test_a_table_is_within_100_columns_and_says_what_is_refused() -> None:
    records = [whole(0.1 * n, ttft_s=20.0 + n, gap_s=1.0) for n in range(40)]
    shown = list(lines(summary_of(records, slo=Slo(ttft_s=1.0))))
    assert max(map(len, shown)) <= 100
    text = "\n".join(shown)
    assert "P95 59, P99 299" in text
    assert "not met" in text


def test_answers_without_usage_are_said() -> None:
    one = whole(0.0)
    one.answer.output_tokens = None
    assert "1 answers without usage" in "\n".join(lines(summary_of([one])))


def test_a_run_is_narrow_enough_when_both_medians_are() -> None:
    same = [whole(0.1 * n) for n in range(40)]
    assert is_narrow(same, 0.05)
    assert not is_narrow(same[:20], 0.05)  # too few to say
    varied = [whole(0.1 * n, ttft_s=0.1 + 0.1 * n) for n in range(40)]
    assert not is_narrow(varied, 0.05)
    assert is_narrow(varied, 0.9)


def test_a_run_without_a_whole_answer_has_no_figures_and_a_table() -> None:
    found = summary_of([failed(0.0, Failure.CONNECT, "refused")], slo=Slo(ttft_s=1.0))
    assert (found.output_tokens_s, found.wall_s, found.met_share) == (0.0, 0.0, 0.0)
    assert "1 connection refused" in "\n".join(lines(found))
    assert "0 of 0 whole" in "\n".join(lines(summary_of([], slo=Slo(ttft_s=1.0))))


def test_failures_show_what_was_said_most_often() -> None:
    said = ["CUDA out of memory"] * 2 + ["engine stopped"]
    records = [failed(float(n), Failure.IN_STREAM, text) for n, text in enumerate(said)]
    records += [failed(4.0, Failure.RESET, "long " * 60), failed(5.0, Failure.CONNECT)]
    summary = summary_of([whole(0.0), *records])
    cause = str(Failure.IN_STREAM)
    assert summary.failures_said[cause] == "CUDA out of memory"
    shown = list(lines(summary))
    assert any(line.strip() == f"{cause}: CUDA out of memory" for line in shown)
    assert max(map(len, shown)) <= 100
