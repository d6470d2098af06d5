"""TensorRT-LLM's words: `trtllm-serve`.

Read from tensorrt_llm/commands/serve.py at commit 00209af1. No wheel of it can be installed here,
so nothing but these words checks what we write.
"""

from __future__ import annotations

from headrace.core.foreign.values import COUNT, ON, SHARE
from headrace.core.foreign.words import Engine, about, sets

_FIELDS = (
    sets("--max_seq_len", "context_tokens", COUNT),
    sets("--max_batch_size", "max_sequences", COUNT),
    sets("--max_num_tokens", "max_batch_tokens", COUNT),
    sets("--tp_size --tensor_parallel_size", "tensor_parallel", COUNT),
    sets("--pp_size --pipeline_parallel_size", "pipeline_parallel", COUNT),
    # Of the memory that weights and buffers leave.
    sets("--kv_cache_free_gpu_memory_fraction --free_gpu_memory_fraction", "kv_fraction", SHARE),
    sets("--enable_chunked_prefill", "chunked_prefill", ON),
    sets("--host", "host"),
    sets("--port", "port", COUNT),
    sets("--revision", "revision"),
    sets("--log_level", "log_level"),
)

# Every other argument, by what it is about.
_TOPICS = {
    "apart": """
        --metadata_server_config_file= --server_role= --disagg_cluster_uri=
    """,
    "experts": """
        --moe_expert_parallel_size|--ep_size= --moe_cluster_parallel_size|--cluster_size=
    """,
    "http": """
        --num_postprocess_workers=
    """,
    "kernels": """
        --backend=
    """,
    "loading": """
        --custom_module_dirs= --config|--extra_llm_api_options= --trust_remote_code
    """,
    "long_context": """
        --fail_fast_on_attention_window_too_large
    """,
    "observe": """
        --otlp_traces_endpoint=
    """,
    "one_gpu": """
        --context_parallel_size|--cp_size= --gpus_per_node=
    """,
    "scheduling": """
        --max_beam_width=
    """,
    "template": """
        --chat_template=
    """,
    "text_only": """
        --media_io_kwargs=
    """,
    "tokenizer": """
        --tokenizer= --custom_tokenizer=
    """,
    "tools": """
        --reasoning_parser= --tool_parser=
    """,
}

TRTLLM = Engine(
    name="trtllm",
    label="TensorRT-LLM",
    version="of commit 00209af1",
    source="tensorrt_llm/commands/serve.py at commit 00209af1",
    commands=("trtllm-serve", "trtllm-serve serve"),
    words=(*_FIELDS, *about(_TOPICS)),
    model_is_argument=True,
    defaults={
        "prefix_cache": True, "chunked_prefill": False, "eager": False, "kv_fraction": 0.9,
        "port": 8000, "host": "localhost", "tensor_parallel": 1, "pipeline_parallel": 1,
        "replicas": 1,
    },
)  # fmt: skip
