"""What each engine calls its metrics, and our standard name for it.

Read from the engines' sources (FIELD-2.md, section C: vLLM 2026-08-22, SGLang 2026-08-23, llama.cpp
2026-08-22, LMDeploy 2026-08-21, TGI 2026-01-08, TensorRT-LLM 2026; Triton's nv_inference_* from its
documentation). An older name stands after the newer one. What a table does not have, the engine
does not export.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A metric, or one of those of a metric that have certain labels; `scale` makes it seconds,
    bytes, tokens or a fraction."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNames:
    engine: str
    label: str
    prefix: str  # every page of this engine has a name that begins so
    levels: Mapping[str, tuple[Source, ...]] = field(default_factory=dict)
    counters: Mapping[str, tuple[Source, ...]] = field(default_factory=dict)
    groups: Mapping[str, tuple[Source, str]] = field(default_factory=dict)  # with its label
    histograms: Mapping[str, tuple[Source, ...]] = field(default_factory=dict)
    # A mean without buckets: two counters, a sum and a number.
    means: Mapping[str, tuple[Source, Source]] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)  # why, where there is more to say


def _table(prefix: str, text: str) -> dict[str, tuple[Source, ...]]:
    """Lines `standard = name{label="value"}*scale | older name`."""
    table: dict[str, tuple[Source, ...]] = {}
    for line in text.strip().splitlines():
        standard, _, names = (part.strip() for part in line.partition("="))
        table[standard] = tuple(_source(prefix, each.strip()) for each in names.split("|"))
    return table


def _source(prefix: str, text: str) -> Source:
    text, _, scale = text.partition("*")
    name, _, labels = text.strip().partition("{")
    pairs = tuple(
        (key.strip(), value.strip().strip('"'))
        for key, _, value in (each.partition("=") for each in labels.rstrip("}").split(","))
        if key.strip()
    )
    full = name if name.startswith(("process_", "nv_", "tgi_")) else prefix + name
    return Source(name=full, labels=pairs, scale=float(scale) if scale else 1.0)


_PROCESS = """
process_cpu_s = process_cpu_seconds_total
"""
_START = """
started_at_s = process_start_time_seconds
"""
_VLLM_LEVELS = """
running = num_requests_running
waiting = num_requests_waiting
kv_usage = kv_cache_usage_perc | gpu_cache_usage_perc
"""
_VLLM_COUNTERS = """
preemptions = num_preemptions_total
prefix_queries = prefix_cache_queries_total
prefix_hits = prefix_cache_hits_total
prompt_tokens = prompt_tokens_total
cached_tokens = prompt_tokens_cached_total
generation_tokens = generation_tokens_total
"""
_VLLM_SPECULATION = """
drafts = spec_decode_num_drafts_total
draft_tokens = spec_decode_num_draft_tokens_total
accepted_tokens = spec_decode_num_accepted_tokens_total
"""
# Of 0.32's own, which Headrace has under other names.
_VLLM_MORE = """
computed_prompt_tokens = prompt_tokens_by_source_total{source="local_compute"}
rejected = admission_rejections_total
""".strip()
_VLLM_HISTOGRAMS = """
ttft = time_to_first_token_seconds
itl = inter_token_latency_seconds | time_per_output_token_seconds
tpot = request_time_per_output_token_seconds
e2e = e2e_request_latency_seconds
queue_time = request_queue_time_seconds
prefill_time = request_prefill_time_seconds
decode_time = request_decode_time_seconds
prompt_length = request_prompt_tokens
generation_length = request_generation_tokens
max_tokens_asked = request_params_max_tokens
iteration_tokens = iteration_tokens_total
"""

VLLM = EngineNames(
    engine="vllm",
    label="vLLM",
    prefix="vllm:",
    levels=_table("vllm:", _VLLM_LEVELS + _START.strip()),
    counters=_table("vllm:", _VLLM_COUNTERS + _VLLM_SPECULATION.lstrip() + _VLLM_MORE + _PROCESS),
    groups={"finished": (Source(name="vllm:request_success_total"), "finished_reason")},
    histograms=_table("vllm:", _VLLM_HISTOGRAMS),
)
HEADRACE = EngineNames(
    engine="headrace",
    label="Headrace",
    prefix="headrace:",
    levels=_table(
        "headrace:",
        _VLLM_LEVELS
        + """
waiting_prompt_tokens = waiting_prompt_tokens
weight_bytes = memory_ledger_bytes{part="weights",kind="allocated"}
graph_bytes = memory_ledger_bytes{part="graphs",kind="allocated"}
grammar_processes = grammar_processes
""".strip()
        + _START,
    ),
    counters=_table(
        "headrace:",
        _VLLM_COUNTERS
        + _VLLM_SPECULATION.lstrip()
        + """
computed_prompt_tokens = computed_prompt_tokens_total
preempted_tokens = preempted_tokens_total
rejected = rejected_requests_total
steps = steps_total
grammar_s = grammar_seconds_total
engine_restarts = engine_restarts_total
""".strip()
        + _PROCESS,
    ),
    groups={
        "finished": (Source(name="headrace:request_success_total"), "finished_reason"),
        "step_parts": (Source(name="headrace:step_seconds_total"), "part"),
        "rejected_by_reason": (Source(name="headrace:rejected_requests_total"), "reason"),
        "prefix_misses": (Source(name="headrace:prefix_cache_misses_total"), "reason"),
    },
    histograms=_table("headrace:", _VLLM_HISTOGRAMS),
)
SGLANG = EngineNames(
    engine="sglang",
    label="SGLang",
    prefix="sglang:",
    levels=_table(
        "sglang:",
        """
running = num_running_reqs
waiting = num_queue_reqs
kv_usage = token_usage
kv_tokens = max_total_num_tokens
hit_rate = cache_hit_rate
generation_rate = gen_throughput
grammar_waiting = num_grammar_queue_reqs
acceptance = spec_accept_rate
graphs_used = is_cuda_graph
startup_s = startup_time_seconds
weight_bytes = weight_memory_usage_gb*1e9
graph_bytes = graph_memory_usage_gb*1e9
state_usage = mamba_usage
adapters_pool = lora_pool_utilization
"""
        + _START.strip(),
    ),
    counters=_table(
        "sglang:",
        """
preemptions = num_retracted_requests_total
cached_tokens = cached_tokens_total
prompt_tokens = prompt_tokens_total
generation_tokens = generation_tokens_total
requests = num_requests_total
aborted = num_aborted_requests_total
"""
        + _PROCESS.strip(),
    ),
    histograms=_table(
        "sglang:",
        """
ttft = time_to_first_token_seconds
itl = inter_token_latency_seconds
e2e = e2e_request_latency_seconds
queue_time = queue_time_seconds
""",
    ),
)
TGI = EngineNames(
    engine="tgi",
    label="TGI",
    prefix="tgi_",
    levels=_table("", "running = tgi_batch_current_size\nwaiting = tgi_queue_size"),
    counters=_table(
        "",
        """
requests = tgi_request_count
finished = tgi_request_success
failed = tgi_request_failure
""",
    ),
    histograms=_table(
        "",
        """
e2e = tgi_request_duration
queue_time = tgi_request_queue_duration
tpot = tgi_request_mean_time_per_token_duration
prompt_length = tgi_request_input_length
generation_length = tgi_request_generated_tokens
max_tokens_asked = tgi_request_max_new_tokens
""",
    ),
    absent={
        "kv_usage": "TGI has no gauge of its KV pool",
        "ttft": "TGI has no histogram of the time to first token",
        "preemptions": "TGI does not preempt: it admits by what requests may grow to",
    },
)
LLAMA_CPP = EngineNames(
    engine="llama.cpp",
    label="llama.cpp",
    prefix="llamacpp:",
    levels=_table(
        "llamacpp:",
        """
running = requests_processing
waiting = requests_deferred
prefill_rate = prompt_tokens_seconds
generation_rate = predicted_tokens_seconds
busy_slots = n_busy_slots_per_decode
longest_tokens = n_tokens_max
""",
    ),
    counters=_table(
        "llamacpp:",
        """
prompt_tokens = prompt_tokens_total
cached_tokens = prompt_tokens_cached_total
generation_tokens = tokens_predicted_total
steps = n_decode_total
"""
        + _VLLM_SPECULATION.strip(),
    ),
    means={
        "tpot": (
            Source(name="llamacpp:tokens_predicted_seconds_total"),
            Source(name="llamacpp:tokens_predicted_total"),
        ),
        "prompt_token_time": (
            Source(name="llamacpp:prompt_seconds_total"),
            Source(name="llamacpp:prompt_tokens_total"),
        ),
    },
    absent={
        "kv_usage": "llama.cpp has no gauge of its KV cache; /slots lists what is busy",
        "ttft": "llama.cpp has no histograms",
    },
)
TRTLLM = EngineNames(
    engine="trtllm",
    label="TensorRT-LLM",
    prefix="trtllm_",
    levels=_table(
        "trtllm_",
        """
running = num_requests_running
waiting = num_requests_waiting
kv_usage = kv_cache_utilization
hit_rate = kv_cache_hit_rate
paused = num_paused_requests
places = max_batch_size_runtime | max_batch_size_static
""",
    ),
    counters=_table(
        "trtllm_",
        """
prompt_tokens = prompt_tokens_total
cached_tokens = prompt_cached_tokens_total | prompt_cache_hit_tokens_total
generation_tokens = generation_tokens_total
failed = request_error_total
draft_tokens = spec_decode_num_draft_tokens_total
accepted_tokens = spec_decode_num_accepted_tokens_total
""",
    ),
    groups={"finished": (Source(name="trtllm_request_success_total"), "finished_reason")},
    histograms=_table(
        "trtllm_",
        """
ttft = time_to_first_token_seconds
tpot = time_per_output_token_seconds
e2e = e2e_request_latency_seconds
queue_time = request_queue_time_seconds
prefill_time = request_prefill_time_seconds
decode_time = request_decode_time_seconds
""",
    ),
)
TRITON = EngineNames(
    engine="triton",
    label="Triton",
    prefix="nv_",
    levels=_table(
        "",
        """
running = nv_trt_llm_request_metrics{request_type="scheduled"}
waiting = nv_trt_llm_request_metrics{request_type="waiting"} | nv_inference_pending_request_count
places = nv_trt_llm_request_metrics{request_type="max"}
kv_usage = nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction"}
paused = nv_trt_llm_inflight_batcher_metrics{inflight_batcher_specific_metric="paused_requests"}
gpu_busy = nv_gpu_utilization
gpu_used_bytes = nv_gpu_memory_used_bytes
gpu_memory_bytes = nv_gpu_memory_total_bytes
""",
    ),
    counters=_table(
        "", "finished = nv_inference_request_success\nfailed = nv_inference_request_failure"
    ),
    histograms=_table("", "ttft = nv_inference_first_response_histogram_ms*1e-3"),
    means={
        "queue_time": (
            Source(name="nv_inference_queue_duration_us", scale=1e-6),
            Source(name="nv_inference_request_success"),
        ),
        "e2e": (
            Source(name="nv_inference_request_duration_us", scale=1e-6),
            Source(name="nv_inference_request_success"),
        ),
    },
    absent={"generation_tokens": "Triton counts requests, not tokens"},
)
LMDEPLOY = EngineNames(
    engine="lmdeploy",
    label="LMDeploy",
    prefix="lmdeploy:",
    levels=_table(
        "lmdeploy:",
        """
running = num_requests_running
waiting = num_requests_waiting
kv_usage = gpu_cache_usage_perc
hit_rate = prefix_cache_hit_rate
""",
    ),
    counters=_table(
        "lmdeploy:",
        """
prompt_tokens = prompt_tokens_total
cached_tokens = cached_tokens_total
generation_tokens = generation_tokens_total
failed = num_requests_failed
""",
    ),
    groups={"finished": (Source(name="lmdeploy:request_success_total"), "finished_reason")},
    histograms=_table(
        "lmdeploy:",
        """
ttft = time_to_first_token_seconds
tpot = time_per_output_token_seconds
e2e = e2e_request_latency_seconds
queue_time = request_queue_time_seconds
prefill_time = request_prefill_time_seconds
decode_time = request_decode_time_seconds
""",
    ),
)
# Headrace gives vLLM's names too: whoever comes first is who it is.
ENGINES = (HEADRACE, SGLANG, LMDEPLOY, TRTLLM, TGI, LLAMA_CPP, VLLM, TRITON)
# Gauges of several replicas on one page: the fullest decides; all others add up.
FULLEST = frozenset(
    {"kv_usage", "hit_rate", "gpu_busy", "acceptance", "graphs_used", "startup_s", "started_at_s",
     "state_usage", "adapters_pool", "busy_slots", "longest_tokens"}
)  # fmt: skip
EVERY = tuple(
    sorted({n for e in ENGINES for t in (e.levels, e.counters, e.groups, e.histograms) for n in t})
)
