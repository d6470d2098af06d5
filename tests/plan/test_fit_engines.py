"""What engines do with a model that does not fit, and what would make it fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.backends.demands import Setup, demand_on_gpu
from headrace.core.sizes import GIB
from headrace.models.known import find_known
from headrace.plan.fit import Fit, fit_on
from headrace.plan.fit_changes import Choice, changes
from headrace.plan.fit_engines import REFUSES, SPILLS, STARTS, EngineAnswer, engine_answers

GPU, HOST = 2e12, 3e11  # bytes per second
SPEC = find_known("llama-3.1-8b").spec
DEMANDS = {
    (precision, kv): demand_on_gpu(
        SPEC, Setup(precision=precision, kv_dtype=kv), multiprocessors=132
    )
    for precision in ("bf16", "fp8", "int8", "int4")
    for kv in ("bf16", "fp8")
}


def fitted(budget: int, context: int = 8192, concurrency: int = 4, **kinds: str) -> Fit:
    demand = DEMANDS[kinds.get("precision", "bf16"), kinds.get("kv_dtype", "bf16")]
    return fit_on(
        demand, memory_bytes=budget, budget_bytes=budget, context_tokens=context,
        concurrency=concurrency,
    )  # fmt: skip


def answers(fit: Fit) -> dict[str, EngineAnswer]:
    found = engine_answers(fit, bandwidth_bytes_s=GPU, host_bandwidth_bytes_s=HOST)
    return {answer.engine: answer for answer in found}


def test_some_sequences_fit() -> None:
    found = answers(fitted(19 * GIB))
    for name in ("Headrace", "vLLM", "SGLang"):
        assert found[name].does == STARTS
        assert "holds 2 of 4 sequences" in found[name].words


def test_two_gpus_have_more_room_and_one_streams_bandwidth() -> None:
    """A model of 16 GB in halves on two GPUs of 6 GB each: layers spill as on one GPU of 12."""
    half = demand_on_gpu(SPEC, Setup(precision="bf16", tp=2), multiprocessors=132)
    fit = fit_on(
        half, memory_bytes=6 * GIB, budget_bytes=6 * GIB, context_tokens=1024, concurrency=1
    )
    both, one = answers(fit), answers(fitted(12 * GIB, context=1024, concurrency=1))
    assert both["Headrace"].does == REFUSES
    assert "does not divide" in both["Headrace"].words
    halves, whole = both["llama.cpp"], one["llama.cpp"]
    assert halves.layers_on_gpu is not None
    assert whole.layers_on_gpu is not None
    assert halves.tokens_per_s is not None
    assert whole.tokens_per_s is not None
    # Buffers are on each GPU: somewhat fewer layers, and so somewhat slower.
    assert whole.layers_on_gpu - 4 <= halves.layers_on_gpu <= whole.layers_on_gpu
    assert 0.7 * whole.tokens_per_s < halves.tokens_per_s <= whole.tokens_per_s


def test_not_even_one_sequence_fits() -> None:
    found = answers(fitted(17 * GIB))
    assert found["Headrace"].does == found["vLLM"].does == REFUSES
    assert "(8192), (1.00 GiB KV cache is needed" in found["vLLM"].words
    assert "less than one context" in found["SGLang"].words


def test_not_even_the_weights_fit() -> None:
    found = answers(fitted(8 * GIB))
    for name in ("Headrace", "vLLM", "SGLang"):
        assert found[name].does == REFUSES
    assert "No available memory for the cache blocks" in found["vLLM"].words
    assert "--mem-fraction-static" in found["SGLang"].words


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 20), st.integers(64, 131_072), st.integers(1, 16))
def test_layers_that_spill(gib: int, context: int, concurrency: int) -> None:
    fit = fitted(gib * GIB, context, concurrency)
    if fit.fits:
        return
    found = answers(fit)["llama.cpp"]
    assert found.does == SPILLS
    assert found.layers_on_gpu is not None
    assert found.tokens_per_s is not None
    assert 0 <= found.layers_on_gpu < SPEC.layers
    read = fit.demand.work.token_read_bytes + fit.demand.each_bytes(context)
    assert HOST / read <= found.tokens_per_s * 1.0001
    assert found.tokens_per_s <= GPU / read
    more = replace(fit, budget_bytes=fit.budget_bytes + GIB)
    if not more.fits:
        again = answers(more)["llama.cpp"]
        assert again.layers_on_gpu is not None
        assert again.layers_on_gpu >= found.layers_on_gpu


@settings(deadline=None, max_examples=50)
@given(st.integers(4, 24), st.integers(300, 131_072), st.integers(1, 64))
def test_every_change_fits_and_changes_something(gib: int, context: int, concurrency: int) -> None:
    asked = Choice(
        precision="bf16", kv_dtype="bf16", tp=1, context_tokens=context, concurrency=concurrency
    )
    fit = fitted(gib * GIB, context, concurrency)

    def attempt(choice: Choice) -> Fit | None:
        if choice.tp > 1:
            return None
        return fitted(
            gib * GIB, choice.context_tokens, choice.concurrency,
            precision=choice.precision, kv_dtype=choice.kv_dtype,
        )  # fmt: skip

    if fit.fits:
        return
    for change in changes(asked, fit, attempt):
        assert change.choice != asked
        result = attempt(change.choice)
        assert result is not None
        assert result.fits
        assert change.spare_bytes == result.spare_bytes >= 0


def test_more_gpus_are_named_once_and_last() -> None:
    asked = Choice(precision="bf16", kv_dtype="bf16", tp=1, context_tokens=8192, concurrency=4)

    def attempt(choice: Choice) -> Fit | None:
        return None if choice.tp in (1, 3) else fitted(100 * GIB)

    found = changes(asked, fitted(8 * GIB), attempt)
    assert [change.flags for change in found] == ["--gpus 2 --tp 2"]


def test_a_speed_that_is_not_known_is_left_out() -> None:
    found = engine_answers(fitted(8 * GIB), bandwidth_bytes_s=None, host_bandwidth_bytes_s=HOST)
    assert all(answer.tokens_per_s is None for answer in found)
    assert not any("tokens/s" in answer.words for answer in found)
    with pytest.raises(StopIteration):
        next(answer for answer in found if not answer.source)
