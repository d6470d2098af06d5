"""LMDeploy's words: `lmdeploy serve api_server`.

Read from the wheel lmdeploy 0.18.0 (cli/serve.py, cli/utils.py); tests/dialects/ parses what we
write with that version's own parser.
"""

from __future__ import annotations

from headrace.core.foreign.speculation import methods
from headrace.core.foreign.values import COUNT, ON, SHARE, TEXTS, Names
from headrace.core.foreign.vllm import DTYPES
from headrace.core.foreign.words import Engine, about, sets

_KV_TYPES = Names(
    {
        "none": None, "0": None, "int8": "int8", "8": "int8", "int4": "int4", "4": "int4",
        "fp8": "fp8", "16": "fp8", "fp8_e5m2": "fp8_e5m2", "17": "fp8_e5m2",
    }
)  # fmt: skip
_FORMATS = Names(
    {
        "hf": None, "awq": "awq", "gptq": "gptq", "fp8": "fp8", "mxfp4": "mxfp4",
        "compressed-tensors": "compressed-tensors",
    }
)  # fmt: skip

_FIELDS = (
    sets("--session-len", "context_tokens", COUNT),
    sets("--max-batch-size", "max_sequences", COUNT),
    sets("--max-prefill-token-num", "max_batch_tokens", COUNT),
    sets("--tp", "tensor_parallel", COUNT),
    sets("--dp", "replicas", COUNT),
    # Of the memory that the weights leave; as a whole number above 1, blocks.
    sets("--cache-max-entry-count", "kv_fraction", SHARE),
    sets("--dtype", "dtype", DTYPES),
    sets("--model-format", "quantization", _FORMATS),
    sets("--quant-policy", "kv_dtype", _KV_TYPES),
    sets("--enable-prefix-caching", "prefix_cache", ON),
    sets("--eager-mode", "eager", ON),
    sets(
        "--speculative-algorithm",
        "speculation.method",
        methods(eagle="eagle", eagle3="eagle3", mtp="deepseek_mtp"),
    ),
    sets("--speculative-draft-model", "speculation.draft"),
    sets("--speculative-num-draft-tokens", "speculation.tokens", COUNT),
    sets("--backend", "lmdeploy_engine"),
    sets("--server-name", "host"),
    sets("--server-port", "port", COUNT),
    sets("--model-name", "served_model_name", TEXTS),
    sets("--api-keys", "api_key", several=True),
    sets("--revision", "revision"),
    sets("--allow-origins", "cors_origin", TEXTS, several=True),
    sets("--log-level", "log_level"),
)

# Every other argument, by what it is about.
_TOPICS = {
    "admission": """
        --max-concurrent-requests=
    """,
    "apart": """
        --role= --migration-backend= --kv-transfer-config=
    """,
    "cache": """
        --prefix-cache-state-budget= --num-gpu-blocks= --cache-block-seq-len=
    """,
    "experts": """
        --enable-return-routed-experts --ep= --enable-eplb --moe-a2a-backend=
    """,
    "graphs": """
        --cudagraph-capture-batch-sizes=+ --piecewise-cudagraph-max-tokens=
    """,
    "http": """
        --allow-credentials --allow-methods=+ --allow-headers=+ --disable-fastapi-docs
        --allow-terminate-by-client
    """,
    "kernels": """
        --kernel-block-size=
    """,
    "loading": """
        --download-dir= --hf-overrides=
    """,
    "logs": """
        --max-log-len=
    """,
    "long_context": """
        --rope-scaling-factor=
    """,
    "lora": """
        --adapters=+
    """,
    "observe": """
        --disable-metrics
    """,
    "one_gpu": """
        --distributed-executor-backend= --node-rank= --nnodes= --cp= --communicator=
        --dist-init-addr=
    """,
    "other": """
        --proxy-url= --enable-abort-handling --trust-remote-code --device= --empty-init
        --num-tokens-per-iter= --async=
    """,
    "sampling": """
        --generation-config= --logprobs-mode=
    """,
    "scheduling": """
        --prefix-cache-decode-state-interval= --enable-microbatch --max-prefill-iters=
    """,
    "speculation": """
        --dllm-block-length= --dllm-unmasking-strategy= --dllm-denoising-steps=
        --dllm-confidence-threshold= --speculative-dflash-block-size=
    """,
    "template": """
        --chat-template=
    """,
    "text_only": """
        --allowed-media-domains=+ --language-model-only --vision-max-batch-size=
    """,
    "tls": """
        --ssl
    """,
    "tools": """
        --tool-call-parser= --reasoning-parser=
    """,
}

LMDEPLOY = Engine(
    name="lmdeploy",
    label="LMDeploy",
    version="0.18.0",
    source="the wheel lmdeploy 0.18.0: cli/serve.py, cli/utils.py",
    commands=("lmdeploy serve api_server",),
    words=(*_FIELDS, *about(_TOPICS)),
    model_is_argument=True,
    defaults={
        "prefix_cache": False, "chunked_prefill": True, "eager": False, "kv_fraction": 0.8,
        "port": 23333, "host": "0.0.0.0", "tensor_parallel": 1, "pipeline_parallel": 1,
        "replicas": 1,
    },
)  # fmt: skip
