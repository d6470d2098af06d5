"""MFU and bandwidth use of a run whose operations are counted another way."""

from __future__ import annotations

import pytest
from tests.bench.test_summary import summary_of, whole

from headrace.backends.demands import Setup, demand_on_gpu
from headrace.bench.efficiency import efficiency
from headrace.core.errors import ConfigError
from headrace.hardware.gpus import find_gpu
from headrace.models.known import find_known

GPU, KNOWN = find_gpu("h100-sxm"), find_known("llama-3.1-8b-instruct")


def test_operations_are_about_two_a_parameter_and_token() -> None:
    """105 tokens a request over 8.03e9 parameters, less the embedding table, and one output layer
    for the prompt: the rule of thumb that everyone uses, within 15%."""
    summary = summary_of([whole(0.1 * n) for n in range(40)])
    found = efficiency(summary, KNOWN.spec, GPU, precision="bf16", gpus=1)
    assert found.flops == pytest.approx(40 * 104 * 2 * 7.5e9, rel=0.15)
    peak = GPU.flops["bf16"]
    assert peak is not None
    assert found.mfu == pytest.approx(found.flops / summary.wall_s / peak)


def test_what_came_from_the_cache_was_not_computed() -> None:
    records = [whole(0.1 * n) for n in range(40)]
    whole_run = efficiency(summary_of(records), KNOWN.spec, GPU, precision="bf16", gpus=1)
    for one in records:
        one.answer.cached_tokens = 80
    cached = efficiency(summary_of(records), KNOWN.spec, GPU, precision="bf16", gpus=1)
    assert cached.flops == pytest.approx(whole_run.flops * 24 / 104, rel=0.1)


def test_bandwidth_of_one_stream_is_weights_by_gap() -> None:
    """One answer, 50 ms a token: 20 times the weights a second while tokens come."""
    summary = summary_of([whole(0.0, ttft_s=0.05, tokens=200)])
    found = efficiency(summary, KNOWN.spec, GPU, precision="bf16", gpus=1)
    assert found.steps == pytest.approx(199)
    demand = demand_on_gpu(KNOWN.spec, Setup(precision="bf16", tp=1), multiprocessors=132)
    expected = 20 * demand.work.read_bytes / GPU.bandwidth_bytes_s  # type: ignore[operator]
    assert found.bandwidth_use == pytest.approx(expected, rel=0.03)


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match="precision is 'int3'"):
        efficiency(summary_of([whole(0.0)]), KNOWN.spec, GPU, precision="int3", gpus=1)
