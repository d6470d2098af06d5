"""Text Generation Inference's words: `text-generation-launcher`.

Read from launcher/src/main.rs of 3.3.7, the last release: the project is in maintenance. It is no
Python package, so nothing but these words checks what we write.
"""

from __future__ import annotations

from headrace.core.foreign.values import COUNT, SHARE, TEXTS, Names
from headrace.core.foreign.words import Engine, about, sets

_QUANTIZATIONS = Names(
    {
        "fp8": "fp8", "awq": "awq", "gptq": "gptq", "marlin": "gptq", "eetq": "int8",
        "compressed-tensors": "compressed-tensors",
    }
)  # fmt: skip

_FIELDS = (
    sets("--model-id", "model"),
    sets("--max-total-tokens", "context_tokens", COUNT),
    sets("--max-batch-size", "max_sequences", COUNT),
    sets("--max-batch-prefill-tokens", "max_batch_tokens", COUNT),
    sets("--max-batch-total-tokens", "kv_tokens", COUNT),
    sets("--num-shard", "tensor_parallel", COUNT),
    sets("--cuda-memory-fraction", "gpu_memory", SHARE),
    sets("--dtype", "dtype", Names({"bfloat16": "bf16", "float16": "fp16"})),
    sets("--quantize", "quantization", _QUANTIZATIONS),
    sets("--kv-cache-dtype", "kv_dtype", Names({"fp8_e4m3fn": "fp8", "fp8_e5m2": "fp8_e5m2"})),
    sets("$PREFIX_CACHING", "prefix_cache", Names({"1": True, "0": False, "true": True})),
    sets("--cuda-graphs", "eager", Names({"0": True})),
    sets("--speculate", "speculation.tokens", COUNT),
    sets("--hostname", "host"),
    sets("--port -p", "port", COUNT),
    sets("--api-key", "api_key"),
    sets("--revision", "revision"),
    sets("--cors-allow-origin", "cors_origin", TEXTS),
)

# Every other argument, by what it is about.
_TOPICS = {
    "admission": """
        --max-concurrent-requests=
    """,
    "cache": """
        --huggingface-hub-cache=
    """,
    "debug": """
        --watermark-gamma= --watermark-delta=
    """,
    "http": """
        --shard-uds-path= --ngrok --ngrok-authtoken= --ngrok-edge=
        --graceful-termination-timeout|-g=
    """,
    "kernels": """
        --disable-custom-kernels
    """,
    "loading": """
        --weights-cache-override= --payload-limit=
    """,
    "long_context": """
        --rope-scaling= --rope-factor=
    """,
    "lora": """
        --lora-adapters=
    """,
    "observe": """
        --prometheus-port= --otlp-endpoint= --otlp-service-name= --usage-stats=
    """,
    "one_gpu": """
        --master-addr= --master-port= --sharded=
    """,
    "other": """
        --validation-workers= --trust-remote-code --max-input-tokens= --max-input-length=
        --json-output --env|-e
    """,
    "sampling": """
        --max-stop-sequences= --max-top-n-tokens= --enable-prefill-logprobs
    """,
    "scheduling": """
        --max-best-of= --waiting-served-ratio= --max-waiting-tokens= --max-client-batch-size=
    """,
    "structured": """
        --disable-grammar-support
    """,
    "tokenizer": """
        --tokenizer-config-path=
    """,
}

TGI = Engine(
    name="tgi",
    label="Text Generation Inference",
    version="3.3.7",
    source="launcher/src/main.rs at commit db931fcf (after 3.3.7)",
    commands=("text-generation-launcher",),
    words=(*_FIELDS, *about(_TOPICS)),
    defaults={
        "prefix_cache": True, "chunked_prefill": True, "eager": False, "gpu_memory": 1.0,
        "port": 3000, "host": "0.0.0.0", "tensor_parallel": 1, "pipeline_parallel": 1,
        "replicas": 1,
    },
)  # fmt: skip
