"""SGLang's words: `python -m sglang.launch_server` and `sglang serve`.

Read from the wheel sglang 0.5.23 (srt/server_args.py, srt/arg_groups/); tests/dialects/ parses what
we write with that version's own parser.
"""

from __future__ import annotations

from headrace.core.foreign.speculation import methods
from headrace.core.foreign.values import COUNT, OFF, ON, SHARE, TEXTS, Count, Names
from headrace.core.foreign.vllm import DTYPES
from headrace.core.foreign.words import Engine, about, sets

_KV_TYPES = Names(
    {
        "auto": None, "bf16": "bf16", "bfloat16": "bf16", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8_e5m2",
        "nvfp4": "nvfp4",
    }
)  # fmt: skip
_QUANTIZATIONS = Names(
    {
        "fp8": "fp8", "awq": "awq", "awq_marlin": "awq", "gptq": "gptq", "gptq_marlin": "gptq",
        "w8a8_int8": "int8", "mxfp4": "mxfp4", "modelopt_fp4": "nvfp4",
        "compressed-tensors": "compressed-tensors", "unquant": None,
    }
)  # fmt: skip
_METHODS = methods(draft="STANDALONE", ngram="NGRAM", eagle="EAGLE", eagle3="EAGLE3", mtp="NEXTN")
_GRAPHS = Names({"disabled": True, "full": False, "breakable": False})

_FIELDS = (
    sets("--model-path --model", "model"),
    sets("--context-length", "context_tokens", COUNT),
    sets("--max-running-requests", "max_sequences", COUNT),
    # A chunk of a prompt; -1 turns chunks off (dialects/read.py).
    sets("--chunked-prefill-size", "chunk_tokens", Count(unset=())),
    sets("--tp-size --tensor-parallel-size --tp", "tensor_parallel", COUNT),
    sets("--pp-size --pipeline-parallel-size --pp", "pipeline_parallel", COUNT),
    sets("--dp-size --data-parallel-size --dp", "replicas", COUNT),
    # Weights and KV pool alone: activations and graphs come on top, unlike vLLM's share.
    sets("--mem-fraction-static", "static_memory", SHARE),
    sets("--max-total-tokens", "kv_tokens", COUNT),
    sets("--dtype", "dtype", DTYPES),
    sets("--quantization", "quantization", _QUANTIZATIONS),
    sets("--kv-cache-dtype", "kv_dtype", _KV_TYPES),
    sets("--disable-radix-cache", "prefix_cache", OFF),
    sets("--cuda-graph-backend-decode", "eager", _GRAPHS),
    sets("--cuda-graph-backend-prefill", "eager", _GRAPHS),
    sets("--disable-cuda-graph", "eager", ON, written=False),
    sets("--speculative-algorithm --speculative-algo", "speculation.method", _METHODS),
    sets("--speculative-draft-model-path --speculative-draft-model", "speculation.draft"),
    # The window that is verified: one more than what is proposed (dialects/read.py).
    sets("--speculative-num-draft-tokens", "speculation.window", COUNT),
    sets(
        "--load-format", "load_format", Names({"auto": None, "safetensors": None, "dummy": "dummy"})
    ),
    sets("--host", "host"),
    sets("--port", "port", COUNT),
    sets("--served-model-name", "served_model_name", TEXTS),
    sets("--api-key", "api_key"),
    sets("--revision", "revision"),
    sets("--schedule-policy", "policy"),
    sets("--device", "device"),
    sets("--log-level", "log_level"),
)

# Every other argument, by what it is about.
_TOPICS = {
    "admission": """
        --max-queued-requests=
    """,
    "apart": """
        --kv-events-config= --disaggregation-mode= --disaggregation-transfer-backend=
        --disaggregation-bootstrap-port= --disaggregation-ib-device=
        --disaggregation-decode-enable-radix-cache --disaggregation-decode-enable-offload-kvcache
        --disaggregation-decode-retraction-backup= --num-reserved-decode-tokens=
        --disaggregation-decode-extra-slots= --disaggregation-decode-polling-interval=
        --optimistic-prefill-attempts= --enable-pdmux --pdmux-config-path= --sm-group-num=
        --disaggregation-enable-kv-checksum --enable-pd-role-switch
        --disaggregation-decode-host-receive-threshold= --disaggregation-decode-allocation-policy=
    """,
    "cache": """
        --page-size= --c128-page-size= --radix-eviction-policy= --radix-eviction-policy-config=
        --enable-page-major-kv-layout --enable-kv-cache-sharding --enable-cache-report
        --enable-session-radix-cache --kv-canary= --kv-canary-real-data=
    """,
    "debug": """
        --rl-quant-profile= --sleep-on-idle --return-input-ids --return-output-ids
        --crash-dump-folder= --enable-layerwise-nvtx-marker --enable-deterministic-inference
        --debug-tensor-dump-output-folder= --debug-tensor-dump-layers=+
        --debug-tensor-dump-input-file= --enable-memory-saver --enable-return-hidden-states
        --return-hidden-states-mode= --enable-return-indexer-topk --enable-mis --forward-hooks=
        --msprobe-dump-config= --watermark-config= --enable-return-aux-hidden-states
        --return-aux-hidden-state-layer-ids=+
    """,
    "experts": """
        --moe-dp-size|--moe-data-parallel-size= --enable-shared-experts-attn-tp
        --shared-experts-tp-size= --enable-fused-moe-sum-all-reduce
        --speculative-moe-runner-backend= --speculative-moe-a2a-backend=
        --speculative-enable-w4a4-mxfp4-megamoe --ep-size|--expert-parallel-size|--ep=
        --moe-a2a-backend= --enable-w4a4-mxfp4-megamoe --deepep-v2-mode= --moe-runner-backend=
        --flashinfer-mxfp4-moe-precision= --deepep-mode= --fuseep-mode=
        --deepep-dispatcher-output-dtype= --ep-num-redundant-experts= --ep-dispatch-algorithm=
        --init-expert-location= --enable-eplb --eplb-algorithm= --eplb-rebalance-num-iterations=
        --eplb-rebalance-layers-per-chunk= --eplb-min-rebalancing-utilization-threshold=
        --expert-distribution-recorder-mode= --expert-distribution-recorder-buffer-size=
        --expert-balancedness-report-mode= --deepep-config= --moe-dense-tp-size=
        --elastic-ep-backend= --enable-elastic-expert-backup --enable-waterfill
        --elastic-ep-join-mode= --elastic-ep-join-rank-offset= --elastic-ep-initial-size=
        --max-ep-size= --elastic-ep-scale-timeout= --disable-flashinfer-cutlass-moe-fp4-allgather
        --disable-shared-experts-fusion --enforce-shared-experts-fusion --experts-shared-outer-loras
        --lora-use-virtual-experts --kt-num-gpu-experts= --kt-max-deferred-experts-per-token=
        --enable-return-routed-experts --flashinfer-a2a-dispatch-type= --enable-paged-experts
        --paged-experts-num-resident= --enable-megamoe-for-layernorm-sp --enable-ep-moe
        --enable-deepep-moe
    """,
    "graphs": """
        --skip-server-warmup --warmups= --cuda-graph-config= --cuda-graph-max-bs-decode=
        --cuda-graph-max-bs-prefill= --cuda-graph-bs-decode=+ --cuda-graph-bs-prefill=+
        --cuda-graph-prefill-max-context|--context-bucket= --disable-prefill-cuda-graph
        --disable-decode-cuda-graph --disable-cuda-graph-padding --enable-profile-cuda-graph
        --enable-cudagraph-gc --debug-cuda-graph --enable-torch-compile
        --enable-torch-compile-debug-mode --torch-compile-max-bs= --cuda-graph-max-seq-len-prefill=
        --cuda-graph-max-bs= --cuda-graph-bs=+
    """,
    "http": """
        --quantization-param-path= --modelopt-export-path= --gated-launch-port= --watchdog-timeout=
        --soft-watchdog-timeout= --fastapi-root-path= --enable-http2 --http2-max-concurrent-streams=
        --http2-initial-connection-window-size= --admin-api-key= --file-storage-path=
        --stream-response-default-include-usage --smg-http-sidecar-port|--grpc-http-sidecar-port=
        --engine-info-bootstrap-port= --enable-http-worker-reuseport
    """,
    "kernels": """
        --tokenizer-backend= --enable-fp32-lm-head --enable-tf32-matmul --enable-priority-scheduling
        --disable-priority-preemption --default-priority-value= --abort-on-priority-when-disabled
        --schedule-low-priority-values-first --priority-scheduling-preemption-threshold=
        --enable-dsa-cache-layer-split --attention-backend= --decode-attention-backend=
        --enable-lean-attention --prefill-attention-backend= --grammar-backend=
        --radix-cache-backend= --fp8-gemm-backend= --fp4-gemm-backend= --bf16-gemm-backend=
        --dsa-prefill-backend= --dsv4-prefill-backend= --dsa-decode-backend=
        --dsa-paged-mqa-logits-backend= --dsa-topk-backend= --disable-flashinfer-autotune
        --flashinfer-autotune-skip-ops=+ --triton-attention-reduce-in-fp32
        --triton-attention-num-kv-splits= --triton-attention-split-tile-size=
        --flashinfer-mla-disable-ragged --enable-fused-qk-norm-rope --enable-deepseek-v4-fp4-indexer
        --weight-loader-prefetch-num-threads= --remote-instance-weight-loader-backend=
        --dsv4-attn-backend= --enable-amd-monokernel --dsa-triton-union= --enable-dsa-fused-indexer
        --enable-nvidia-megakernel --sampling-backend= --monokernel-backend=
    """,
    "loading": """
        --model-loader-extra-config= --model-impl= --json-model-override-args=
        --modelopt-checkpoint-restore-path= --modelopt-checkpoint-save-path= --weight-version=
        --startup-weight-load-mode= --custom-weight-loader=+ --weight-loader-disable-mmap
        --weight-loader-prefetch-checkpoints --weight-loader-drop-cache-after-load
        --remote-instance-weight-loader-seed-instance-ip=
        --remote-instance-weight-loader-seed-instance-service-port=
        --remote-instance-weight-loader-send-weights-group-ports=
        --remote-instance-weight-loader-start-seed-via-transfer-engine --modelexpress-config=
        --download-dir= --model-checksum= --delete-ckpt-after-loading --decrypted-config-file=
        --checkpoint-engine-wait-weights-before-ready --enable-weights-cpu-backup
        --weight-cache-mode= --weight-cache-socket= --weight-cache-timeout=
    """,
    "logs": """
        --log-level-http= --log-requests --log-requests-level= --log-requests-format=
        --log-requests-target=+ --uvicorn-access-log-exclude-prefixes=+ --show-time-cost
        --decode-log-interval=
    """,
    "long_context": """
        --swa-full-tokens-ratio= --disable-hybrid-swa-memory --swa-prefix-tails=
        --enable-decoder-swa-bounded-replay
    """,
    "lora": """
        --uno-lora-path= --enable-lora --enable-lora-overlap-loading --max-lora-rank=
        --lora-target-modules=+ --lora-paths=+ --max-loaded-loras= --max-loras-per-batch=
        --lora-eviction-policy= --lora-backend= --max-lora-chunk-size= --lora-strict-loading
        --lora-drain-wait-threshold=
    """,
    "observe": """
        --enable-metrics --enable-mfu-metrics --enable-metrics-for-all-schedulers
        --load-snapshot-publish-interval= --tokenizer-metrics-custom-labels-header=
        --tokenizer-metrics-allowed-custom-labels=+ --extra-metric-labels=
        --bucket-time-to-first-token=+ --bucket-inter-token-latency=+ --bucket-e2e-request-latency=+
        --prompt-tokens-buckets=+ --generation-tokens-buckets=+ --enable-request-time-stats-logging
        --load-publish-endpoint= --enable-forward-pass-metrics --forward-pass-metrics-worker-id=
        --forward-pass-metrics-ipc-name= --enable-trace --trace-modules= --otlp-traces-endpoint=
        --export-metrics-to-file --export-metrics-to-file-dir=
        --prefill-delayer-forward-passes-buckets=+ --prefill-delayer-wait-seconds-buckets=+
        --otlp-service-name=
    """,
    "offload": """
        --enable-hierarchical-cache|--enable-hicache --hicache-host-memory-mode= --hicache-ratio=
        --hicache-size= --hicache-write-policy= --hicache-io-backend= --hicache-mem-layout=
        --hicache-storage-backend= --hicache-storage-prefetch-policy=
        --hicache-storage-backend-extra-config= --hicache-storage-prefetch-retry-poll-interval=
        --hicache-storage-prefetch-retry-max-attempts= --enable-unified-cache-external-linker
        --unified-cache-external-linker-backend= --enable-hisparse
        --hisparse-config|--hierarchical-sparse-attention-extra-config= --cpu-offload-gb=
        --offload-group-size= --offload-num-in-group= --offload-prefetch-step= --offload-mode=
        --enable-lmcache --lmcache-config-file= --enable-flexkv --flexkv-config-file=
        --kt-weight-path= --kt-method= --kt-cpuinfer= --kt-threadpool-count= --ple-offload-embedding
        --ple-offload-backend= --ple-offload-dir= --hicache-host-memory-fraction=
        --enable-linker-mla-dedup --unified-cache-external-linker-config=
    """,
    "one_gpu": """
        --nccl-port= --dist-timeout= --dist-init-addr|--nccl-init-addr= --nnodes= --node-rank=
        --dcp-size|--decode-context-parallel-size= --pp-max-micro-batch-size=
        --pp-async-batch-depth= --attn-dp-size|--attention-data-parallel-size=
        --load-balance-method= --attn-cp-size|--attention-context-parallel-size= --dwdp-size=
        --dcp-comm-backend= --dcp-replicate-q-proj --enable-prefill-cp --cp-strategy=
        --enable-cp-decode-attn-tp --enable-dp-attention-local-control-broadcast --enable-dp-lm-head
        --enable-tp-lm-head-all-to-all --enable-attn-tp-input-scattered --enable-dense-mlp-attn-tp
        --enable-layernorm-sp --disable-attn-tp-gather --enable-p2p-check --base-gpu-id=
        --gpu-id-step= --use-ray --numa-node=+ --smg-grpc-mode --grpc-mode --grpc-port=
        --enable-nccl-nvls --enable-symm-mem --disable-custom-all-reduce --enable-mscclpp
        --enable-torch-symm-mem --pre-warm-nccl --boundary-reduction= --enable-quant-communications
        --enforce-disable-flashinfer-allreduce-fusion --flashinfer-allreduce-fusion-backend=
        --enable-aiter-allreduce-fusion --tbo-token-distribution-threshold=
        --disable-aiter-allreduce-fusion-in-prefill --disable-aiter-allreduce-fusion-in-decode
        --grpc-response-timeout-secs= --enable-dp-attention --enable-flashinfer-allreduce-fusion
    """,
    "other": """
        --trust-remote-code --is-embedding --model-config-parser= --modelopt-quant=
        --quantize-and-serve --enable-unified-memory --gc-threshold=+ --sidecar= --sidecar-args=
        --allow-auto-truncate --incremental-streaming-output --enable-streaming-session
        --gc-warning-threshold-secs= --enable-precise-embedding-interpolation --mooncake-ib-device=
        --rl-on-policy-target= --enable-response-store --qsa-indexer-dtype= --config=
    """,
    "recurrent": """
        --mamba-backend= --enable-scattered-sconv --max-mamba-cache-size= --mamba-ssm-dtype=
        --mamba-max-states-per-path= --enable-mamba-cache-stochastic-rounding
        --mamba-cache-philox-rounds= --mamba-full-memory-ratio= --mamba-radix-cache-strategy=
        --mamba-track-interval= --enable-int8-mamba-checkpoint --int8-mamba-ckpt-size=
        --linear-attn-backend= --linear-attn-decode-backend= --linear-attn-prefill-backend=
        --linear-attn-verify-backend= --enable-linear-replayssm --linear-replayssm-cache-len=
        --enable-linear-replayssm-spec
    """,
    "sampling": """
        --random-seed= --mlx-enable-sampling --sampling-defaults= --preferred-sampling-params=
        --enable-custom-logit-processor --sampling-mask-max-tokens=
    """,
    "scheduling": """
        --prefill-decode-interval= --enable-dynamic-chunking --max-prefill-tokens=
        --prefill-max-requests= --retraction-policy= --schedule-conservativeness=
        --prefill-only-disable-kv-cache --disable-chunked-prefix-cache --disable-overlap-schedule
        --num-continuous-decode-steps= --scheduler-recv-interval= --enable-mixed-chunk
        --stream-interval= --batch-notify-size= --enable-two-batch-overlap
        --enable-single-batch-overlap --enable-prefill-delayer --prefill-delayer-max-delay-passes=
        --prefill-delayer-token-usage-low-watermark= --prefill-delayer-queue-min-ratio=
        --prefill-delayer-max-delay-ms= --min-free-slots-delay= --kv-canary-sweep-interval=
        --prefill-kv-cache-dequant-dtype= --enable-watermark --prefill-decode-interval-min-bs=
    """,
    "speculation": """
        --speculative-draft-model-revision= --speculative-draft-load-format=
        --speculative-num-steps= --speculative-eagle-topk= --speculative-dflash-block-size=
        --speculative-dspark-block-size= --speculative-dspark-sps-table-path=
        --speculative-dspark-confidence-sts-path=
        --speculative-dspark-align-verify-tokens-to-graph-tier
        --speculative-accept-threshold-single= --speculative-accept-threshold-acc=
        --speculative-use-rejection-sampling --speculative-token-map= --speculative-attention-mode=
        --speculative-draft-attention-backend= --speculative-dsa-topk-backend=
        --speculative-draft-kv-cache-dtype= --speculative-draft-window-size=
        --speculative-draft-model-quantization= --enable-multi-layer-eagle --speculative-adaptive
        --speculative-adaptive-config= --decoupled-spec-bind-endpoint=
        --decoupled-spec-connect-endpoints= --decoupled-spec-rank= --decoupled-spec-role=
        --spec-trace-dir= --speculative-ngram-min-bfs-breadth= --speculative-ngram-max-bfs-breadth=
        --speculative-ngram-match-type= --speculative-ngram-max-trie-depth=
        --speculative-ngram-capacity= --speculative-ngram-external-corpus-path=
        --speculative-ngram-external-sam-budget= --speculative-ngram-external-corpus-max-tokens=
        --dllm-algorithm= --dllm-algorithm-config= --dllm-fdfo --decrypted-draft-config-file=
        --enable-draft-weights-cpu-backup --speculative-domino-candidate-pool-size=
        --speculative-use-block-verification --speculative-draft-sink-size=
    """,
    "structured": """
        --constrained-json-whitespace-pattern= --constrained-json-disable-any-whitespace
        --constrained-json-max-whitespace-cnt= --disable-outlines-disk-cache
    """,
    "template": """
        --chat-template= --trust-request-chat-template --hf-chat-template-name=
        --completion-template= --default-chat-template-kwargs=
    """,
    "text_only": """
        --enable-multimodal --asr-max-buffer-seconds= --asr-max-concurrent-sessions=
        --mm-attention-backend= --enable-broadcast-mm-inputs-process --enable-prefix-mm-cache
        --mm-enable-dp-encoder --mm-process-config= --mm-processor-worker-num= --mm-io-worker-num=
        --allowed-media-domains=+ --media-url-max-file-size-mb= --mm-preprocess-cache-size-mb=
        --trust-mm-content-hashes --limit-mm-data-per-request= --enable-mm-global-cache
        --image-processor-backend= --mm-global-cache-backend= --disable-fast-image-processor
        --mm-feature-transport= --encoder-only --language-only --language-model-only
        --encoder-transfer-backend= --encoder-urls=+ --encoder-bootstrap-port=
        --encoder-register-urls=+ --enable-adaptive-dispatch-to-encoder
        --enable-encoder-swa-bounded-replay
    """,
    "tls": """
        --ssl-keyfile= --ssl-certfile= --ssl-ca-certs= --ssl-keyfile-password= --enable-ssl-refresh
    """,
    "tokenizer": """
        --tokenizer-path= --tokenizer-mode= --tokenizer-worker-num= --detokenizer-worker-num=
        --skip-tokenizer-init --enable-dynamic-batch-tokenizer --dynamic-batch-tokenizer-batch-size=
        --dynamic-batch-tokenizer-batch-timeout= --enable-tokenizer-batch-encode
        --disable-tokenizer-batch-decode
    """,
    "tools": """
        --strip-thinking-cache --enable-strict-thinking --tool-server= --reasoning-parser=
        --tool-call-parser=
    """,
}

SGLANG = Engine(
    name="sglang",
    label="SGLang",
    version="0.5.23",
    source="the wheel sglang 0.5.23: srt/server_args.py, srt/arg_groups/",
    commands=("python -m sglang.launch_server", "sglang serve"),
    words=(*_FIELDS, *about(_TOPICS)),
    defaults={
        "prefix_cache": True, "chunked_prefill": True, "eager": False, "port": 30000,
        "host": "127.0.0.1", "tensor_parallel": 1, "pipeline_parallel": 1, "replicas": 1,
    },
)  # fmt: skip
