"""Ollama's words: a Modelfile's parameters, and the server's variables.

Read from docs/modelfile.mdx, docs/faq.mdx, api/types.go and envconfig/config.go of 0.33.0-rc2. A
parameter of a Modelfile is written here as %num_ctx, a variable as $OLLAMA_NUM_PARALLEL.
"""

from __future__ import annotations

from headrace.core.foreign.llama_cpp import KV_TYPES
from headrace.core.foreign.values import COUNT, Count
from headrace.core.foreign.words import Engine, about, sets

_FIELDS = (
    sets("%from", "model"),
    sets("%num_ctx", "context_tokens", COUNT),
    sets("%num_batch", "max_batch_tokens", COUNT),
    sets("%num_gpu", "gpu_layers", Count(unset=("-1",))),
    sets("%draft", "speculation.draft"),
    sets("%draft_num_predict", "speculation.tokens", COUNT),
    sets("$OLLAMA_NUM_PARALLEL", "max_sequences", COUNT),
    sets("$OLLAMA_KV_CACHE_TYPE", "kv_dtype", KV_TYPES),
    sets("$OLLAMA_HOST", "address"),
    sets("$OLLAMA_CONTEXT_LENGTH", "context_tokens", COUNT, written=False),
)

_TOPICS = {
    "other": """
        $OLLAMA_DEBUG= $OLLAMA_FLASH_ATTENTION= $OLLAMA_GPU_OVERHEAD= $OLLAMA_KEEP_ALIVE=
        $OLLAMA_LOAD_TIMEOUT= $OLLAMA_MAX_LOADED_MODELS= $OLLAMA_MAX_QUEUE= $OLLAMA_MODELS=
        $OLLAMA_NOPRUNE= $OLLAMA_ORIGINS= $OLLAMA_SCHED_SPREAD= $OLLAMA_LLM_LIBRARY= %main_gpu=
        %use_mmap= %num_thread= %template= %system= %adapter= %license= %message= %renderer=
        %parser= %requires= %temperature= %top_k= %top_p= %min_p= %seed= %stop= %num_predict=
        %repeat_penalty= %repeat_last_n=
    """,
}

OLLAMA = Engine(
    name="ollama",
    label="Ollama",
    version="0.33.0-rc2",
    source="docs/modelfile.mdx, docs/faq.mdx, api/types.go, envconfig/config.go of 0.33.0-rc2",
    commands=("ollama serve", "ollama run", "ollama create"),
    words=(*_FIELDS, *about(_TOPICS)),
    defaults={
        "prefix_cache": True, "chunked_prefill": True, "eager": False, "max_sequences": 1,
        "port": 11434, "host": "127.0.0.1", "tensor_parallel": 1, "pipeline_parallel": 1,
        "replicas": 1,
    },
)  # fmt: skip
