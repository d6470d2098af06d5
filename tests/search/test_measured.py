"""A benchmark's file: its rate and lengths, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import ConfigError
from headrace.search.measured import read_measured

# The keys of `vllm bench serve --save-result`.
RESULT: dict[str, Any] = {
    "model_id": "meta-llama/Llama-3.1-8B",
    "request_rate": 20.0,
    "max_concurrency": None,
    "duration": 60.0,
    "completed": 1000,
    "failed": 0,
    "total_input_tokens": 512_000,
    "total_output_tokens": 300_000,
    "request_throughput": 16.7,
    "output_throughput": 5000.0,
    "total_token_throughput": 13533.3,
}


def write(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({**RESULT, **changes}))
    return path


def test_rate_and_lengths(tmp_path: Path) -> None:
    found = read_measured(write(tmp_path))
    assert found.output_tokens_s == 5000
    assert (found.mix.input_tokens, found.mix.output_tokens) == (512, 300)
    assert found.model == "meta-llama/Llama-3.1-8B"
    assert "1,000 requests" in found.notes[0]


def test_only_requests_within_the_objective_count(tmp_path: Path) -> None:
    found = read_measured(write(tmp_path, request_goodput=8.35))
    assert found.output_tokens_s == pytest.approx(2500)
    assert "50.0%" in found.notes[1]
    assert read_measured(write(tmp_path, request_goodput=None)).output_tokens_s == 5000


def test_failures_are_said(tmp_path: Path) -> None:
    assert "7 requests failed" in read_measured(write(tmp_path, failed=7)).notes[1]


@pytest.mark.parametrize("change", [{"max_concurrency": 1}, {"max_concurrent_requests": 1},
                                    {"completed": 1}])  # fmt: skip
def test_a_single_stream_is_refused(tmp_path: Path, change: dict[str, int]) -> None:
    path = write(tmp_path, output_throughput=118.0, **change)
    with pytest.raises(ConfigError, match=r"one stream.*\$15\.07 a million"):
        read_measured(path, 6.40)


@pytest.mark.parametrize("key", ["output_throughput", "total_input_tokens", "total_output_tokens",
                                 "completed"])  # fmt: skip
def test_what_is_missing_or_wrong_is_named(tmp_path: Path, key: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({k: v for k, v in RESULT.items() if k != key}))
    with pytest.raises(ConfigError, match=f"lacks {key}"):
        read_measured(path)
    for bad in (-1, "many", None, True, float("nan")):
        with pytest.raises(ConfigError, match=key):
            read_measured(write(tmp_path, **{key: bad}))


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00", "7"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bench\.json"):
        read_measured(path)
    with pytest.raises(ConfigError, match="can't be read"):
        read_measured(tmp_path / "absent.json")
