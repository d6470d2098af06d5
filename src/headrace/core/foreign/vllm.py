"""vLLM's words: `vllm serve` and `LLM(...)`, engine and frontend arguments.

Read from the wheel vllm 0.32.0 (engine/arg_utils.py, entrypoints/launchers/cli_args.py, config/);
tests/dialects/ parses what we write with that version's own parser. Words of older versions that
people still type are here too.
"""

from __future__ import annotations

from headrace.core.foreign.speculation import SpeculationJson, methods
from headrace.core.foreign.values import COUNT, OFF, ON, SHARE, TEXTS, Names
from headrace.core.foreign.words import Engine, about, sets

DTYPES = Names(
    {
        "auto": None, "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32",
        "float": "fp32", "fp8": "fp8",
    }
)  # fmt: skip
_KV_TYPES = Names(
    {
        "auto": None, "bfloat16": "bf16", "float16": "f16", "fp8": "fp8", "fp8_e4m3": "fp8",
        "fp8_e5m2": "fp8_e5m2", "int8_per_token_head": "int8", "int4_per_token_head": "int4",
        "nvfp4": "nvfp4",
    }
)  # fmt: skip
_QUANTIZATIONS = Names(
    {
        "fp8": "fp8", "awq": "awq", "awq_marlin": "awq", "auto_awq": "awq", "gptq": "gptq",
        "gptq_marlin": "gptq", "auto_gptq": "gptq", "mxfp4": "mxfp4", "gpt_oss_mxfp4": "mxfp4",
        "modelopt_fp4": "nvfp4", "int8_per_channel_weight_only": "int8",
        "compressed-tensors": "compressed-tensors", "none": None,
    }
)  # fmt: skip
_METHODS = methods(
    draft="draft_model", ngram="ngram", eagle="eagle", eagle3="eagle3", mtp="mtp", medusa="medusa"
)

_FIELDS = (
    sets("--model", "model"),
    sets("--max-model-len", "context_tokens", COUNT),
    sets("--max-num-seqs", "max_sequences", COUNT),
    sets("--max-num-batched-tokens", "max_batch_tokens", COUNT),
    sets("--tensor-parallel-size -tp", "tensor_parallel", COUNT),
    sets("--pipeline-parallel-size -pp", "pipeline_parallel", COUNT),
    sets("--data-parallel-size -dp", "replicas", COUNT),
    sets("--gpu-memory-utilization --device-memory-utilization", "gpu_memory", SHARE),
    sets("--kv-cache-memory-bytes", "kv_memory", COUNT),
    sets("--dtype", "dtype", DTYPES),
    sets("--quantization -q", "quantization", _QUANTIZATIONS),
    sets("--kv-cache-dtype", "kv_dtype", _KV_TYPES),
    sets("--enable-prefix-caching", "prefix_cache", ON),
    sets("--no-enable-prefix-caching", "prefix_cache", OFF),
    sets("--enable-chunked-prefill", "chunked_prefill", ON),
    sets("--no-enable-chunked-prefill", "chunked_prefill", OFF),
    sets("--enforce-eager", "eager", ON),
    sets("--speculative-config -sc", "speculation", SpeculationJson(_METHODS)),
    sets("--spec-method", "speculation.method", _METHODS, written=False),
    sets("--spec-model --speculative-model", "speculation.draft", written=False),
    sets("--spec-tokens --num-speculative-tokens", "speculation.tokens", COUNT, written=False),
    sets(
        "--load-format", "load_format", Names({"auto": None, "safetensors": None, "dummy": "dummy"})
    ),
    sets("--host", "host"),
    sets("--port", "port", COUNT),
    sets("--served-model-name", "served_model_name", TEXTS, several=True),
    sets("--api-key", "api_key", several=True),
    sets("--revision", "revision"),
    sets("--scheduling-policy", "policy"),
    sets("--device", "device"),
    sets("--allowed-origins", "cors_origin", TEXTS),
    sets("--log-level", "log_level"),
    sets("--uvicorn-log-level", "log_level", written=False),
    sets("--max-logprobs", "max_logprobs", COUNT),
    sets("--generation-config", "generation_config", Names({"auto": "auto", "vllm": "none"})),
    sets("--shutdown-timeout", "drain_timeout_s"),
)

# Every other argument, by what it is about.
_TOPICS = {
    "admission": """
        --max-num-queued-reqs= --max-num-queued-tokens=
    """,
    "apart": """
        --kv-transfer-config= --kv-events-config= --ec-transfer-config= --ec-manager-config=
        --weight-transfer-config=
    """,
    "cache": """
        --block-size= --num-gpu-blocks-override= --kv-cache-dtype-skip-layers=+
        --disable-hybrid-kv-cache-manager --use-v2-block-manager --num-lookahead-slots=
        --calculate-kv-scales
    """,
    "debug": """
        --return-tokens-as-token-ids --enable-sleep-mode --sleep-preserve-parameter-names=+
        --enable-layerwise-nvtx-tracing --watermark-config= --profiler-config=
    """,
    "experts": """
        --enable-return-routed-experts --enable-expert-parallel|-ep --enable-ep-weight-filter
        --all2all-backend= --enable-elastic-ep --elastic-ep-max-dp-size= --enable-eplb
        --eplb-config= --expert-placement-strategy= --enable-mixed-moe-lora-format
        --enable-moe-shared-loras --moe-backend=
    """,
    "graphs": """
        --cudagraph-metrics --cudagraph-capture-sizes=+ --max-cudagraph-capture-size=
        --compilation-config|-cc= --optimization-level= --performance-mode= --cuda-graph-sizes=+
        --full-cuda-graph
    """,
    "http": """
        --enable-force-include-usage --cohere-format= --uds= --allow-credentials --allowed-methods=
        --allowed-headers= --root-path= --middleware= --enable-request-id-headers
        --disable-fastapi-docs --h11-max-incomplete-event-size= --h11-max-header-count=
        --enable-offline-docs
    """,
    "hub": """
        --code-revision= --tokenizer-revision= --hf-token=
    """,
    "kernels": """
        --enable-flash-late-interaction --use-fp64-gumbel --disable-cascade-attn
        --attention-backend= --jit-monitor-mode= --jit-monitor-verbose --ir-op-priority=
        --enable-flashinfer-autotune --linear-backend= --sparse-indexer-topk-backend=
        --attention-config|-ac= --kernel-config= --guided-decoding-backend=
    """,
    "loading": """
        --hf-config-path= --config-format= --hf-overrides= --model-class-overrides= --model-impl=
        --download-dir= --safetensors-load-strategy= --safetensors-prefetch-num-threads=
        --safetensors-prefetch-block-size= --model-loader-extra-config= --ignore-patterns=+
        --use-tqdm-on-load --pt-load-map-location=
    """,
    "logs": """
        --max-log-len= --enable-log-outputs --enable-log-deltas --log-error-stack
        --disable-uvicorn-access-log --disable-access-log-for-endpoints= --logging-config=
        --log-config-file= --enable-logging-iteration-details --aggregate-engine-logging
        --enable-log-requests --disable-log-requests
    """,
    "long_context": """
        --disable-sliding-window --swa-bounded-replay --rope-scaling= --rope-theta=
    """,
    "lora": """
        --lora-modules=+ --enable-lora --max-loras= --max-lora-rank= --lora-dtype=
        --enable-tower-connector-lora --max-cpu-loras= --fully-sharded-loras --lora-target-modules=+
        --default-mm-loras= --specialize-active-lora --max-lora-cls-labels=
    """,
    "observe": """
        --enable-per-request-metrics --enable-server-load-tracking --enable-trace-replay
        --show-hidden-metrics-for-version= --otlp-traces-endpoint= --collect-detailed-traces=+
        --kv-cache-metrics --kv-cache-metrics-sample= --custom-histogram-buckets=
        --enable-mfu-metrics --disable-log-stats
    """,
    "offload": """
        --sleep-mode-offload-cudagraph --kv-offloading-size= --kv-offloading-backend=
        --offload-backend= --cpu-offload-gb= --cpu-offload-params=+ --offload-group-size=
        --offload-num-in-group= --offload-prefetch-step= --offload-params=+ --swap-space=
    """,
    "one_gpu": """
        --headless --api-server-count|-asc= --grpc --grpc-port= --data-parallel-supervisor-port=
        --dp-supervisor-probe-interval-s= --dp-supervisor-probe-timeout-s=
        --dp-supervisor-probe-failure-threshold= --enable-nccl-comm-suspend
        --distributed-executor-backend= --master-addr= --master-port= --nnodes|-n= --node-rank|-r=
        --distributed-timeout-seconds= --cpu-distributed-timeout-seconds= --numa-bind
        --numa-bind-nodes=+ --numa-bind-cpus=+ --device-ids= --decode-context-parallel-size|-dcp=
        --dcp-comm-backend= --dcp-q-replicate --dcp-kv-cache-interleave-size=
        --cp-kv-cache-interleave-size= --prefill-context-parallel-size|-pcp=
        --data-parallel-rank|-dpn= --data-parallel-start-rank|-dpr= --data-parallel-size-local|-dpl=
        --data-parallel-address|-dpa= --data-parallel-rpc-port|-dpp= --data-parallel-backend|-dpb=
        --data-parallel-hybrid-lb|-dph --data-parallel-external-lb|-dpe
        --data-parallel-multi-port-external-lb|-dpm --enable-hc-sp --enable-dbo
        --enable-shm-tensor-arena --ubatch-size= --dbo-decode-token-threshold= --dp-sync-interval=
        --dbo-prefill-token-threshold= --disable-nccl-for-dp-synchronization
        --max-parallel-loading-workers= --ray-workers-use-nsight --disable-custom-all-reduce
        --worker-cls= --worker-extension-cls= --enable-fault-tolerance --fault-tolerance-config=
        --worker-use-ray --engine-use-ray
    """,
    "other": """
        --config= --enable-prompt-tokens-details --tokens-only --enable-scale-out
        --fingerprint-mode= --fingerprint-value= --runner= --convert= --trust-remote-code
        --quantization-config= --allow-deprecated-quantization --enable-prompt-embeds
        --pooler-config= --enable-cumem-allocator --io-processor-plugin= --renderer-num-workers=
        --prefix-caching-hash-algo= --prefix-match-unit= --engram-config= --additional-config=
        --aux-output-config= --fail-on-environ-validation --max-seq-len-to-capture=
        --preemption-mode= --max-context-len-to-capture= --task= --override-pooler-config=
        --disable-frontend-multiprocessing -O=
    """,
    "recurrent": """
        --mamba-backend= --mamba-ssu-algorithm= --enable-mamba-cache-stochastic-rounding
        --mamba-cache-philox-rounds= --mamba-cache-dtype= --mamba-ssm-cache-dtype=
        --mamba-block-size= --mamba-cache-mode= --enable-mamba-shared-prefix-checkpoint
        --replayssm-buffer-len= --use-replayssm --gdn-prefill-backend= --kda-prefill-backend=
        --kda-decode-backend=
    """,
    "sampling": """
        --seed= --return-sampling-mask --logprobs-mode= --override-generation-config=
        --logits-processors=+ --enable-batch-sharded-sampling
    """,
    "scheduling": """
        --sse-keep-alive-interval= --prefix-cache-retention-interval= --kv-sharing-fast-prefill
        --max-num-scheduled-tokens= --max-num-active-seqs= --long-prefill-token-threshold=
        --long-prefill-token-threshold-adaptive --scheduler-cls= --scheduler-reserve-full-isl
        --watermark= --prefill-schedule-interval= --async-scheduling --stream-interval=
        --num-scheduler-steps= --max-num-partial-prefills= --max-long-partial-prefills=
        --scheduler-delay-factor=
    """,
    "speculation": """
        --per-request-spec-decode-metrics= --diffusion-config|-dc=
    """,
    "structured": """
        --structured-outputs-config=
    """,
    "template": """
        --chat-template= --chat-template-content-format= --trust-request-chat-template
        --default-chat-template-kwargs= --response-role=
    """,
    "text_only": """
        --trust-request-mm-kwargs --allowed-local-media-path= --allowed-media-domains=+
        --language-model-only --limit-mm-per-prompt= --enable-mm-embeds --media-io-kwargs=
        --mm-processor-kwargs= --mm-processor-cache-gb= --mm-processor-cache-type=
        --mm-hasher-algorithm= --mm-shm-cache-max-object-size-mb= --mm-encoder-only
        --mm-encoder-tp-mode= --mm-encoder-attn-backend= --mm-encoder-attn-dtype=
        --mm-encoder-fp8-scale-path= --mm-encoder-fp8-scale-save-path=
        --mm-encoder-fp8-scale-save-margin= --interleave-mm-strings --skip-mm-profiling
        --video-pruning-rate= --video-pruning-method= --mm-tensor-ipc= --mm-processor-device=
        --mm-ipc-gpu-memory-gb= --mm-device-do-normalize --disable-chunked-mm-input
        --disable-mm-preprocessor-cache
    """,
    "tls": """
        --ssl-keyfile= --ssl-certfile= --ssl-ca-certs= --enable-ssl-refresh --ssl-cert-reqs=
        --ssl-ciphers=
    """,
    "tokenizer": """
        --enable-tokenizer-info-endpoint --tokenizer= --tokenizer-mode= --skip-tokenizer-init
        --tokenizer-pool-size=
    """,
    "tools": """
        --enable-auto-tool-choice --exclude-tools-when-tool-choice-none --tool-call-parser=
        --tool-parser-plugin= --tool-strict-level= --tool-server= --cohere-is-reasoning-model
        --anthropic-disabled-thinking-effort= --reasoning-parser= --reasoning-parser-plugin=
        --reasoning-config= --enable-reasoning
    """,
}

VLLM = Engine(
    name="vllm",
    label="vLLM",
    version="0.32.0",
    source="the wheel vllm 0.32.0: engine/arg_utils.py, entrypoints/launchers/cli_args.py, config/",
    commands=("vllm serve", "python -m vllm.entrypoints.openai.api_server"),
    words=(*_FIELDS, *about(_TOPICS)),
    model_is_argument=True,
    defaults={
        "prefix_cache": True, "chunked_prefill": True, "eager": False, "gpu_memory": 0.92,
        "port": 8000, "tensor_parallel": 1, "pipeline_parallel": 1, "replicas": 1,
    },
)  # fmt: skip
