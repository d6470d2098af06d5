"""llama.cpp's words: `llama-server`.

Read from tools/server/README.md and common/arg.cpp of build b10586. It is no Python package, so
nothing but these words checks what we write.
"""

from __future__ import annotations

from headrace.core.foreign.speculation import methods
from headrace.core.foreign.values import COUNT, OFF, ON, Count, Fixed, Names
from headrace.core.foreign.words import Engine, about, sets

KV_TYPES = Names(
    {
        name: name
        for name in ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
    }
)

_FIELDS = (
    sets("-m --model", "model"),
    sets("-hf -hfr --hf-repo", "model_repo"),
    # Of all slots together, unless they share it (dialects/read.py).
    sets("-c --ctx-size", "all_context_tokens", Count(unset=("0",))),
    sets("-np --parallel", "max_sequences", COUNT),
    sets("-kvu --kv-unified", "shares_context", ON),
    sets("-no-kvu --no-kv-unified", "shares_context", OFF, written=False),
    sets("-b --batch-size", "max_batch_tokens", COUNT),
    sets("-ctk --cache-type-k", "kv_dtype", KV_TYPES),
    sets("-ctv --cache-type-v", "value_dtype", KV_TYPES),
    sets("-ngl --gpu-layers --n-gpu-layers", "gpu_layers", Count(unset=("auto", "-1"))),
    sets("-sm --split-mode", "split_mode"),
    sets("-ts --tensor-split", "tensor_split"),
    sets("--cache-prompt", "prefix_cache", ON),
    sets("--no-cache-prompt", "prefix_cache", OFF),
    sets(
        "--spec-type",
        "speculation.method",
        methods(draft="draft-simple", ngram="ngram-simple", eagle3="draft-eagle3", mtp="draft-mtp"),
    ),
    sets("-md --spec-draft-model --model-draft", "speculation.draft"),
    sets("--spec-draft-n-max --draft-max --draft --draft-n", "speculation.tokens", COUNT),
    sets("-t --threads", "threads", COUNT),
    sets("--host", "host"),
    sets("--port", "port", COUNT),
    sets("-a --alias", "served_model_name"),
    sets("--api-key", "api_key"),
    sets("--api-key-file", "api_keys_file", written=False),
    sets("--cors-origins", "cors_origin"),
    sets("-dev --device", "device", Names({"none": "cpu"})),
    sets("--offline", "offline", Fixed(True)),
)

# Every other argument, by what it is about.
_TOPICS = {
    "cache": """
        --cache-list|-cl --cache-reuse= --slots --slot-save-path= --slot-prompt-similarity|-sps=
    """,
    "debug": """
        --sleep-idle-seconds=
    """,
    "experts": """
        --cpu-moe|-cmoe --n-cpu-moe|-ncmoe= --spec-draft-cpu-moe|--cpu-moe-draft|-cmoed
        --spec-draft-n-cpu-moe|--spec-draft-ncmoe|--n-cpu-moe-draft|-ncmoed=
    """,
    "graphs": """
        --warmup
    """,
    "http": """
        --reuse-port --path= --cors-methods= --cors-headers= --cors-credentials --api-prefix=
        --ui-config|--webui-config= --ui-config-file|--webui-config-file= --ui|--webui
        --timeout|-to= --props
    """,
    "hub": """
        --model-url|-mu= --docker-repo|-dr= --hf-file|-hff= --hf-token|-hft=
    """,
    "kernels": """
        --threads-batch|-tb= --cpu-mask|-C= --cpu-range|-Cr= --cpu-strict= --prio= --poll=
        --cpu-mask-batch|-Cb= --cpu-range-batch|-Crb= --cpu-strict-batch= --prio-batch=
        --poll-batch= --flash-attn|-fa= --yarn-attn-factor= --repack|-nr --backend-sampling|-bs
        --threads-http= --embd-gemma-default
    """,
    "loading": """
        --mlock --mmap --direct-io|-dio|-ndio --load-mode|-lm= --check-tensors --override-kv=
        --ctx-checkpoints|--swa-checkpoints|-ctxcp= --checkpoint-min-step|-cms= --models-autoload
    """,
    "logs": """
        --perf --log-disable --log-file= --log-colors= --verbose|--log-verbose|-v
        --verbosity|--log-verbosity|-lv= --log-prefix --log-timestamps --log-prompts-dir=
    """,
    "long_context": """
        --swa-full --rope-scaling= --rope-scale= --rope-freq-base= --rope-freq-scale=
        --yarn-orig-ctx= --yarn-ext-factor= --yarn-beta-slow= --yarn-beta-fast= --context-shift
    """,
    "lora": """
        --lora= --lora-scaled= --control-vector= --control-vector-scaled=
        --control-vector-layer-range= --lora-init-without-apply
    """,
    "observe": """
        --metrics
    """,
    "offload": """
        --kv-offload|-kvo|-nkvo --no-host --override-tensor|-ot= --op-offload --cache-ram|-cram=
        --cache-idle-slots
    """,
    "one_gpu": """
        --rpc= --numa= --main-gpu|-mg=
    """,
    "other": """
        --completion-bash --predict|--n-predict|-n= --escape|-e --defrag-thold|-dt= --list-devices
        --fit|-fit= --fit-target|-fitt= --fit-ctx|-fitc= --special|-sp --pooling= --tags=
        --embd-normalize= --embedding|--embeddings --rerank|--reranking --models-dir=
        --models-preset= --models-max= --fim-qwen-1.5b-default --fim-qwen-3b-default
        --fim-qwen-7b-default --fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default
        --gpt-oss-20b-default --gpt-oss-120b-default
    """,
    "sampling": """
        --keep= --samplers= --seed|-s= --sampler-seq|--sampling-seq= --ignore-eos
        --temp|--temperature= --top-k= --top-p= --min-p= --top-nsigma|--top-n-sigma=
        --xtc-probability= --xtc-threshold= --typical|--typical-p= --repeat-last-n=
        --repeat-penalty= --presence-penalty= --frequency-penalty= --dry-multiplier= --dry-base=
        --dry-allowed-length= --dry-penalty-last-n= --dry-sequence-breaker= --adaptive-target=
        --adaptive-decay= --dynatemp-range= --dynatemp-exp= --mirostat= --mirostat-lr=
        --mirostat-ent= --logit-bias|-l= --reverse-prompt|-r= --spm-infill
    """,
    "scheduling": """
        --cont-batching|-cb --no-cont-batching|-nocb --ubatch-size|-ub=
    """,
    "speculation": """
        --spec-draft-type-k|--cache-type-k-draft|-ctkd=
        --spec-draft-type-v|--cache-type-v-draft|-ctvd= --lookup-cache-static|-lcs=
        --lookup-cache-dynamic|-lcd= --spec-draft-hf|--hf-repo-draft|-hfd|-hfrd=
        --spec-draft-threads|--threads-draft|-td=
        --spec-draft-threads-batch|--threads-batch-draft|-tbd=
        --spec-draft-cpu-mask|--cpu-mask-draft|-Cd= --spec-draft-cpu-range|--cpu-range-draft|-Crd=
        --spec-draft-cpu-strict|--cpu-strict-draft= --spec-draft-prio|--prio-draft=
        --spec-draft-poll|--poll-draft= --spec-draft-cpu-mask-batch|--cpu-mask-batch-draft|-Cbd=
        --spec-draft-cpu-strict-batch|--cpu-strict-batch-draft=
        --spec-draft-prio-batch|--prio-batch-draft= --spec-draft-poll-batch|--poll-batch-draft=
        --spec-draft-override-tensor|--override-tensor-draft|-otd= --spec-draft-n-min=
        --spec-draft-p-split|--draft-p-split= --spec-draft-p-min|--draft-p-min=
        --spec-draft-backend-sampling --spec-draft-device|--device-draft|-devd=
        --spec-draft-ngl|--gpu-layers-draft|--n-gpu-layers-draft|-ngld= --spec-ngram-mod-n-min=
        --spec-ngram-mod-n-max= --spec-ngram-mod-n-match= --spec-ngram-simple-size-n=
        --spec-ngram-simple-size-m= --spec-ngram-simple-min-hits= --spec-ngram-map-k-size-n=
        --spec-ngram-map-k-size-m= --spec-ngram-map-k-min-hits= --spec-ngram-map-k4v-size-n=
        --spec-ngram-map-k4v-size-m= --spec-ngram-map-k4v-min-hits= --draft-min|--draft-n-min=
        --spec-ngram-size-n= --spec-ngram-size-m= --spec-ngram-min-hits= --spec-default
    """,
    "structured": """
        --grammar= --grammar-file= --json-schema|-j= --json-schema-file|-jf=
    """,
    "template": """
        --chat-template-kwargs= --jinja --chat-template= --chat-template-file= --prefill-assistant
    """,
    "text_only": """
        --mmproj|-mm= --mmproj-url|-mmu= --mmproj-auto|--no-mmproj --mmproj-offload
        --mmproj-device|-mmdev= --image-min-tokens= --image-max-tokens= --mtmd-batch-max-tokens=
        --media-path= --vision-gemma-4b-default --vision-gemma-12b-default
    """,
    "tls": """
        --ssl-key-file= --ssl-cert-file=
    """,
    "tools": """
        --ui-mcp-proxy|--webui-mcp-proxy --tools= --tools-runtime= --mcp-servers-config=
        --mcp-servers-json= --agent|-ag|-no-ag --reasoning-format= --reasoning|-rea=
        --reasoning-effort= --reasoning-budget= --reasoning-budget-message= --reasoning-preserve
        --skip-chat-parsing
    """,
}

LLAMA_CPP = Engine(
    name="llama.cpp",
    label="llama.cpp",
    version="b10586",
    source="tools/server/README.md, tools/server/server.cpp and src/llama-context.cpp of b10586",
    commands=("llama-server", "llama serve"),
    words=(*_FIELDS, *about(_TOPICS)),
    defaults={
        "prefix_cache": True, "chunked_prefill": True, "eager": False, "port": 8080,
        "host": "127.0.0.1", "tensor_parallel": 1, "pipeline_parallel": 1, "replicas": 1,
    },
)  # fmt: skip
