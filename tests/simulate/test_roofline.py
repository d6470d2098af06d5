"""The roofline: never below what must be moved and computed, monotone, and the bounds of worked
examples that others got wrong."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import ConfigError
from headrace.core.step import StepPlan
from headrace.hardware.gpus import find_gpu
from headrace.models.counting import Chunk, StepCount, count_step
from headrace.models.known import find_known
from headrace.models.precision import find_precision
from headrace.models.sizes import size_spec
from headrace.simulate.engines import engines, profile
from headrace.simulate.roofline import IDEAL, StepTimes, peaks_of, roofline_cost, step_times
from headrace.simulate.step_work import Format, Formats, Layout, step_work

BF16 = Format(value_bytes=2.0)
FP8 = Format(value_bytes=1.0, computes="fp8")
# Dense, windows, experts, latent attention, an index over it, recurrent layers.
MODELS = ("llama-3.1-8b", "gpt-oss-120b", "deepseek-v3", "zai-org/GLM-5", "Qwen/Qwen3.5-397B-A17B")

Rows = list[tuple[int, int]]  # tokens computed now, tokens before them
rows_of_steps = st.lists(
    st.tuples(st.integers(1, 600), st.integers(0, 9000)), min_size=1, max_size=40
)


def plan_of(rows: Rows) -> StepPlan:
    plan = StepPlan()
    for number, (count, start) in enumerate(rows):
        plan.add(number, [1] * count, start, [])
    return plan


def times_of(
    model: str,
    gpu: str = "h100-sxm",
    *,
    kept: Format = BF16,
    engine: str | None = None,
    **layout: int,
) -> StepTimes:
    formats = Formats(attention=kept, mlp=kept, experts=kept)
    work = step_work(find_known(model).spec, formats, Layout(**layout))
    found = find_gpu(gpu)
    share = profile(engine, found, formats).efficiencies if engine else IDEAL
    return step_times(work, peaks_of(found, work), share)


def seconds(times: StepTimes, rows: Rows) -> float:
    return roofline_cost(times)(plan_of(rows))


def counted(model: str, rows: Rows) -> StepCount:
    spec = find_known(model).spec
    chunks = [Chunk(tokens=count, start=start) for count, start in rows]
    return count_step(spec, size_spec(spec, find_precision("bf16")), chunks)


@pytest.mark.parametrize("model", MODELS)
def test_work_is_that_of_the_counting_operations(model: str) -> None:
    """One GPU: products to the operation; bytes without norms and the embedding's few rows."""
    work = step_work(
        find_known(model).spec, Formats(attention=BF16, mlp=BF16, experts=BF16), Layout()
    )
    count = counted(model, [(1, 4000)])
    products = work.attention_flops + work.mlp_flops + work.output_flops
    products += work.expert_flops * work.experts_active
    assert count.matmul_flops == pytest.approx(products, rel=1e-3)
    weights = work.attention_bytes + work.mlp_bytes + work.output_bytes
    weights += work.expert_bytes * work.experts_active
    assert count.weight_bytes == pytest.approx(weights, rel=2e-3)
    read = sum(span.read_bytes * min(4001, span.limit) for span in work.spans)
    assert count.kv_read_bytes == pytest.approx(read, rel=2e-3)


@settings(max_examples=40, deadline=None)
@given(rows=rows_of_steps)
def test_neither_bytes_nor_operations_fit_in_less(rows: Rows) -> None:
    count, gpu = counted("llama-3.1-8b", rows), find_gpu("h100-sxm")
    assert gpu.bandwidth_bytes_s is not None
    found = seconds(times_of("llama-3.1-8b"), rows)
    norms = 0.999  # norms and the embedding's rows are not among the roofline's bytes
    moved = count.weight_bytes * norms + count.kv_read_bytes
    tokens = sum(tokens for tokens, _ in rows)
    moved -= tokens * 4096 * 2  # rows of the embedding table
    assert found >= count.flops / gpu.flops["bf16"]
    assert found >= moved / gpu.bandwidth_bytes_s


@settings(max_examples=60, deadline=None)
@given(rows=rows_of_steps, model=st.sampled_from(MODELS), engine=st.sampled_from(engines()))
def test_no_engine_is_below_the_floor(rows: Rows, model: str, engine: str) -> None:
    assert seconds(times_of(model, tp=8, engine=engine), rows) > seconds(
        times_of(model, tp=8), rows
    )


@settings(max_examples=60, deadline=None)
@given(rows=rows_of_steps, model=st.sampled_from(MODELS), data=st.data())
def test_more_work_takes_longer(rows: Rows, model: str, data: st.DataObject) -> None:
    times = times_of(model, tp=8, engine="vllm")
    at = data.draw(st.integers(0, len(rows) - 1))
    count, start = rows[at]
    longer = (count + 1, start) if count > 1 else (1, start + 1)
    for changed in (
        [*rows, (1, 100)],
        [*rows[:at], longer, *rows[at + 1 :]],
        [*rows[:at], (count, start + 100), *rows[at + 1 :]],
    ):
        assert seconds(times, changed) >= seconds(times, rows) * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(
    starts=st.lists(st.integers(0, 9000), min_size=1, max_size=50), copies=st.sampled_from([1, 4])
)
def test_the_short_way_for_decoding_is_the_same_sum(starts: list[int], copies: int) -> None:
    times = times_of("deepseek-v3", tp=8 // copies, copies=copies, engine="sglang")
    context, rows = float(sum(starts) + len(starts)), len(starts)
    whole = times.step_s(rows, rows, decoding=(context,), reading=(0.0,), pairs=(0.0,))
    assert seconds(times, [(1, start) for start in starts]) == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("model", MODELS)
def test_a_mixed_step_reads_its_weights_once(model: str) -> None:
    times = times_of(model, tp=8, engine="vllm")
    decoding, prompt = [(1, 1000)] * 32, [(512, 0)]
    apart = seconds(times, decoding) + seconds(times, prompt)
    together = seconds(times, decoding + prompt)
    assert max(seconds(times, decoding), seconds(times, prompt)) < together < apart


@pytest.mark.parametrize("rows", [[(1, 500)], [(1, 500)] * 64, [(2048, 0)]])
def test_two_gpus_are_faster_but_not_twice(rows: Rows) -> None:
    one, two = (seconds(times_of("llama-3.1-8b", tp=tp, engine="vllm"), rows) for tp in (1, 2))
    assert one / 2 < two < one


def test_gpus_without_a_link_exchange_over_pcie_and_slower() -> None:
    linked = times_of("llama-3.1-8b", "a100-sxm-80gb", tp=2)
    over_pcie = times_of("llama-3.1-8b", "a100-pcie-80gb", tp=2)
    assert over_pcie.token_s > 5 * linked.token_s


def test_stages_save_no_time() -> None:
    one, two = (times_of("llama-3.1-8b", pipeline=stages, engine="vllm") for stages in (1, 2))
    assert seconds(two, [(1, 100)]) > seconds(one, [(1, 100)])


def test_experts_that_few_tokens_choose_are_few() -> None:
    """One token of DeepSeek V3 reads 8 of 256 experts: 37 of 671 billion weights, and each GPU all
    of the low ranks. Many tokens read almost all experts, none more."""
    times = times_of("deepseek-v3", tp=8)
    one, many, more = (seconds(times, [(1, 0)] * rows) for rows in (1, 128, 1024))
    assert 37e9 * 2 / 8 / 3.35e12 < one < 1.25 * 37e9 * 2 / 8 / 3.35e12
    assert many > 0.9 * 671e9 * 2 / 8 / 3.35e12
    assert more < 1.5 * 671e9 * 2 / 8 / 3.35e12


# Worked examples: a claim was faster than the floor, or about a batch that no context was said of.


@pytest.mark.parametrize(
    ("gpu", "most"),
    [("h100-sxm", 47.5), ("a100-sxm-80gb", 29.6)],
)
def test_one_stream_of_70b_in_16_bits_on_two_gpus(gpu: str, most: float) -> None:
    """The bound counts the embedding table, of which a token reads one row: 1.5% of the bytes."""
    floor = seconds(times_of("llama-3.1-70b", gpu, tp=2), [(1, 0)])
    assert 1 / floor <= most * 1.016
    for engine in engines():
        assert 1 / seconds(times_of("llama-3.1-70b", gpu, tp=2, engine=engine), [(1, 0)]) < most


def test_one_stream_of_13b_in_fp8_on_an_l40s() -> None:
    for engine in engines():
        times = times_of("meta-llama/Llama-2-13b", "l40s", kept=FP8, engine=engine)
        assert 1 / seconds(times, [(1, 0)]) < 66


@pytest.mark.parametrize(("model", "least"), [("llama-3.2-1b", 0.082), ("llama-2-7b", 0.464)])
def test_a_prompt_of_32k_on_an_h100(model: str, least: float) -> None:
    assert seconds(times_of(model), [(32768, 0)]) >= least


def test_a_prompt_of_512_for_70b_on_two_a100() -> None:
    assert seconds(times_of("llama-3.1-70b", "a100-sxm-80gb", tp=2), [(512, 0)]) >= 0.112
    for engine in engines():
        times = times_of("llama-3.1-70b", "a100-sxm-80gb", tp=2, engine=engine)
        assert seconds(times, [(512, 0)]) >= 0.113


@pytest.mark.parametrize(("context", "ceiling"), [(1024, 13_300), (4096, 5_100)])
def test_a_batch_of_128_of_8b_on_an_h100(context: int, ceiling: float) -> None:
    floor = seconds(times_of("llama-3.1-8b"), [(1, context - 1)] * 128)
    assert 0.95 * ceiling < 128 / floor <= ceiling * 1.005


def test_what_a_gpu_lacks_is_named() -> None:
    with pytest.raises(ConfigError, match="not known"):
        times_of("llama-3.1-8b", "ddr5-8ch-5600")
    with pytest.raises(ConfigError, match="do not divide"):
        Layout(tp=8, expert_parallel=3)
    with pytest.raises(ConfigError, match="copies is 0"):
        Layout(copies=0)
