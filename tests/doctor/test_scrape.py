"""Each engine's page, typed by hand from its source's names (FIELD-2.md, section C), as standard
values. A name that an engine changes must be changed here first."""

from __future__ import annotations

import pytest

from headrace.doctor.exposition import read_page
from headrace.doctor.names import ENGINES
from headrace.doctor.scrape import Reading, change, gpus_of, read

PAGES = {
    "headrace": """
headrace:num_requests_running{model_name="m"} 3
headrace:num_requests_waiting{model_name="m"} 2
headrace:kv_cache_usage_perc{model_name="m"} 0.5
headrace:num_preemptions_total{model_name="m"} 7
headrace:generation_tokens_total{model_name="m"} 900
headrace:prefix_cache_hits_total{model_name="m"} 64
headrace:time_to_first_token_seconds_bucket{le="0.1",model_name="m"} 4
headrace:time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 5
headrace:time_to_first_token_seconds_sum{model_name="m"} 1.5
headrace:step_seconds_total{model_name="m",part="compute"} 8
vllm:num_requests_running{model_name="m"} 3
""",
    "vllm": """
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:num_preemptions_total{engine="0",model_name="m"} 7.0
vllm:generation_tokens_total{engine="0",model_name="m"} 900.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 64.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="m"} 4.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 5.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 1.5
""",
    "sglang": """
sglang:num_running_reqs{model_name="m"} 3.0
sglang:num_queue_reqs{model_name="m"} 2.0
sglang:token_usage{model_name="m"} 0.5
sglang:num_retracted_requests_total{model_name="m"} 7.0
sglang:generation_tokens_total{model_name="m"} 900.0
sglang:cached_tokens_total{model_name="m"} 64.0
sglang:time_to_first_token_seconds_bucket{le="0.1",model_name="m"} 4.0
sglang:time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 5.0
sglang:time_to_first_token_seconds_sum{model_name="m"} 1.5
""",
    "tgi": """
tgi_batch_current_size 3
tgi_queue_size 2
tgi_request_count{method="generate"} 4
tgi_request_success{method="generate"} 4
tgi_request_queue_duration_bucket{le="0.1"} 4
tgi_request_queue_duration_bucket{le="+Inf"} 5
tgi_request_queue_duration_sum 1.5
""",
    "llama.cpp": """
llamacpp:requests_processing 3
llamacpp:requests_deferred 2
llamacpp:tokens_predicted_total 900
llamacpp:tokens_predicted_seconds_total 18
llamacpp:prompt_tokens_cached_total 64
llamacpp:n_busy_slots_per_decode 1.5
""",
    "trtllm": """
trtllm_num_requests_running 3
trtllm_num_requests_waiting 2
trtllm_kv_cache_utilization 0.5
trtllm_generation_tokens_total 900
trtllm_prompt_cached_tokens_total 64
trtllm_max_batch_size_runtime 256
trtllm_time_to_first_token_seconds_bucket{le="0.1"} 4
trtllm_time_to_first_token_seconds_bucket{le="+Inf"} 5
trtllm_time_to_first_token_seconds_sum 1.5
""",
    "triton": """
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 2
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 3
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="max",version="1"} 512
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="tensorrt_llm"} 0.5
nv_inference_request_success{model="tensorrt_llm",version="1"} 5
nv_inference_queue_duration_us{model="tensorrt_llm",version="1"} 1500000
nv_inference_first_response_histogram_ms_bucket{model="tensorrt_llm",le="100"} 4
nv_inference_first_response_histogram_ms_bucket{model="tensorrt_llm",le="+Inf"} 5
nv_inference_first_response_histogram_ms_sum{model="tensorrt_llm"} 1500
nv_gpu_utilization{gpu_uuid="GPU-1"} 0.7
nv_gpu_memory_used_bytes{gpu_uuid="GPU-1"} 7e10
nv_gpu_memory_total_bytes{gpu_uuid="GPU-1"} 8e10
""",
    "lmdeploy": """
lmdeploy:num_requests_running{model_name="m"} 3.0
lmdeploy:num_requests_waiting{model_name="m"} 2.0
lmdeploy:gpu_cache_usage_perc{model_name="m"} 0.5
lmdeploy:generation_tokens_total{model_name="m"} 900.0
lmdeploy:cached_tokens_total{model_name="m"} 64.0
lmdeploy:time_to_first_token_seconds_bucket{le="0.1",model_name="m"} 4.0
lmdeploy:time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 5.0
lmdeploy:time_to_first_token_seconds_sum{model_name="m"} 1.5
""",
}


def reading(name: str, at_s: float = 0.0) -> Reading:
    return read(read_page(PAGES[name]), at_s)


def test_every_engine_has_a_page() -> None:
    assert {each.engine for each in ENGINES} == set(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_in_standard_names(name: str) -> None:
    found = reading(name)
    assert found.names is not None
    assert found.names.engine == name
    assert found.levels["running"] == 3
    assert found.levels["waiting"] == 2
    if name not in ("tgi", "llama.cpp"):
        assert found.levels["kv_usage"] == 0.5
        assert found.histograms["ttft"].count == 5
        assert found.histograms["ttft"].mean == pytest.approx(0.3)
    if name not in ("tgi", "triton"):
        assert found.counters["generation_tokens"] == 900
    cached = found.counters.get("prefix_hits", found.counters.get("cached_tokens"))
    assert cached == (None if name in ("tgi", "triton") else 64)


@pytest.mark.parametrize("name", PAGES)
def test_missing_is_not_zero_and_has_a_reason(name: str) -> None:
    found = reading(name)
    known = {*found.levels, *found.counters, *found.groups, *found.histograms}
    assert not known & set(found.unknown)
    assert all(found.unknown.values())
    assert "e2e" in found.unknown


def test_reasons_say_whose_fault_it_is() -> None:
    assert "no gauge" in reading("tgi").unknown["kv_usage"]
    assert (
        "vllm:request_queue_time_seconds is not on this page"
        in (reading("vllm").unknown["queue_time"])
    )
    assert reading("vllm").unknown["hit_rate"] == "vLLM does not export it"


def test_older_names_are_read() -> None:
    page = read_page("vllm:num_requests_running 1\nvllm:gpu_cache_usage_perc 0.9\n")
    assert read(page, 0.0).levels["kv_usage"] == 0.9


def test_vllm_tells_computed_tokens_and_refusals_by_label() -> None:
    page = read_page(
        "vllm:num_requests_running 1\n"
        'vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 70\n'
        'vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 30\n'
        'vllm:admission_rejections_total{reason="max_num_queued_reqs"} 2\n'
        'vllm:admission_rejections_total{reason="max_num_queued_tokens"} 3\n'
    )
    found = read(page, 0.0).counters
    assert found["computed_prompt_tokens"] == 70
    assert found["rejected"] == 5


def test_two_readings_are_rates_and_a_restart_is_noticed() -> None:
    text = "vllm:num_requests_running 1\nvllm:generation_tokens_total {}\n"
    first, second, third = (read(read_page(text.format(n)), at) for at, n in
                            enumerate((100, 160, 20)))  # fmt: skip
    grew = change(first, second)
    assert grew.deltas["generation_tokens"] == 60
    assert grew.period_s == 1
    assert not grew.was_restarted
    fell = change(second, third)
    assert fell.deltas["generation_tokens"] == 20
    assert fell.was_restarted


def test_a_mean_from_two_counters() -> None:
    assert reading("llama.cpp").histograms["tpot"].mean == pytest.approx(0.02)
    assert reading("triton").histograms["queue_time"].mean == pytest.approx(0.3)


def test_tritons_page_has_the_gpu() -> None:
    (gpu,) = gpus_of(reading("triton"))
    assert gpu.busy_share == 0.7
    assert gpu.memory_bytes == 8e10


def test_replicas_are_told_apart() -> None:
    text = "".join(
        f'vllm:num_requests_running{{engine="{n}"}} {n}\n'
        f'vllm:num_requests_waiting{{engine="{n}"}} {9 * n}\n'
        for n in (0, 1)
    )
    found = read(read_page(text), 0.0)
    assert [(r.name, r.running, r.waiting) for r in found.replicas] == [("0", 0, 0), ("1", 1, 9)]
    assert found.levels["waiting"] == 9


def test_a_page_of_nothing_known() -> None:
    assert read(read_page("node_cpu_seconds_total 5\n"), 0.0).names is None
