"""The answers: why Headrace has no such word, and what to do instead.

Each is a pair of sentences, for a topic of words or for one word.
"""

from __future__ import annotations

Answer = tuple[str, str]

_LEAVE = "Leave it out."

TOPICS: dict[str, Answer] = {
    "admission": (
        "Headrace counts what waits, not what runs.",
        "Use --max-waiting-requests and --max-waiting-tokens (max_waiting_requests, "
        "max_waiting_tokens).",
    ),
    "apart": (
        "Headrace has its own way to compute prompts and answers apart.",
        "Use --role prefill and --role decode (role), and headrace route --prefill; "
        "docs/prefill-decode.md has an example.",
    ),
    "cache": (
        "Headrace chooses blocks and their order by itself.",
        "Leave it out; --kv-memory, --kv-tokens or --kv-fraction set the size of the KV pool, and "
        "--no-prefix-cache turns the prefix cache off.",
    ),
    "debug": (
        "Headrace does not have this.",
        "Leave it out; --log-level debug and --debug-invariants show more.",
    ),
    "experts": (
        "Headrace does not run models with experts yet.",
        "Serve a dense model.",
    ),
    "graphs": (
        "Headrace chooses the sizes of CUDA graphs by itself, and compiles no model.",
        "Leave it out; --graphs start, lazy or off (graphs) says when graphs are captured.",
    ),
    "http": (
        "Headrace's server does not have this.",
        "Leave it out, or let a reverse proxy do it; docs/configuration.md has the server's "
        "settings.",
    ),
    "hub": (
        "Headrace takes a hub id as org/name, org/name@revision or org/name:file.gguf.",
        "Write it so, as MODEL; a private model needs the variable HF_TOKEN.",
    ),
    "kernels": (
        "Headrace chooses its kernels and threads by itself.",
        "Leave it out; --device says what computes, and --threads how many threads of a CPU.",
    ),
    "loading": (
        "Headrace reads safetensors folders and GGUF files as they are.",
        "Leave it out; the variable HEADRACE_CACHE says where models are kept.",
    ),
    "logs": (
        "Headrace's log has settings of its own.",
        "Use --log-level, --log-format and --log-content (log_level, log_format, log_content).",
    ),
    "long_context": (
        "Headrace takes the model's own positions and windows.",
        "Leave it out; --context-tokens (context_tokens) sets the length of the context.",
    ),
    "lora": (
        "Headrace does not load adapters.",
        "Merge the adapter into the model's weights, and serve those.",
    ),
    "observe": (
        "Headrace always counts, and serves the numbers at /metrics.",
        "Leave it out; --trace exports traces as the OTEL_* variables say.",
    ),
    "offload": (
        "Headrace has weights and KV pool in the memory of one device.",
        "Leave it out; --quantization, --kv-dtype and --context-tokens make a model smaller.",
    ),
    "one_gpu": (
        "Headrace divides a model evenly, and has no such choice.",
        "Leave it out; --tensor-parallel and --pipeline-parallel divide a model among GPUs.",
    ),
    "other": (
        "Headrace has no such setting.",
        "Leave it out; docs/configuration.md has all settings.",
    ),
    "recurrent": (
        "Headrace does not run models with a recurrent state yet.",
        "Serve a model that has attention in all layers.",
    ),
    "sampling": (
        "Headrace takes sampling values from each request, and their defaults from the model.",
        "Leave it out; --generation-config none (generation_config) makes the defaults neutral.",
    ),
    "scheduling": (
        "Headrace's scheduler has settings of its own.",
        "Use --max-batch-tokens, --max-sequences, --max-step-growth and --policy.",
    ),
    "speculation": (
        "Headrace decides by measured time how many tokens to guess, and has few settings for it.",
        "Leave it out; --speculate auto, ngram, suffix or draft:MODEL (speculate) says who "
        "guesses, and --max-draft-tokens (max_draft_tokens) how many tokens at most.",
    ),
    "structured": (
        "Headrace takes a JSON schema, a regex or a grammar from each request.",
        "Leave it out; --max-schema and --max-grammars set limits.",
    ),
    "template": (
        "Headrace uses the chat template that comes with the model.",
        "Change it in the model's folder (tokenizer_config.json or chat_template.jinja).",
    ),
    "text_only": (
        "Headrace serves text, and no images, audio or video.",
        _LEAVE,
    ),
    "tls": (
        "Headrace speaks plain HTTP.",
        "Put a reverse proxy with a certificate before it; docs/deploy.md says what it needs.",
    ),
    "tokenizer": (
        "Headrace uses the tokenizer that comes with the model.",
        _LEAVE,
    ),
    "tools": (
        "Headrace reads from the chat template how a model calls tools, and has no reasoning "
        "parser.",
        _LEAVE,
    ),
}

# Answers for fields, and for words that have one of their own.
OWN_ANSWERS: dict[str, Answer] = {
    "static_memory": (
        "SGLang's share is that of weights and KV pool alone.",
        "Use --gpu-memory (gpu_memory), the share that all of it may take.",
    ),
    "all_context_tokens": (
        "llama.cpp divides this context between its slots.",
        "Use --context-tokens (context_tokens) for one sequence, and --kv-tokens (kv_tokens) for "
        "all together.",
    ),
    "max_total_tokens": (
        "to SGLang this is the size of the KV pool, to Text Generation Inference the longest "
        "sequence.",
        "Use --kv-tokens (kv_tokens) or --context-tokens (context_tokens).",
    ),
    "revision": TOPICS["hub"],
    "model_repo": TOPICS["hub"],
    "split_mode": TOPICS["one_gpu"],
    "tensor_split": TOPICS["one_gpu"],
    "lmdeploy_engine": TOPICS["kernels"],
    "address": TOPICS["http"],
    "offline": TOPICS["hub"],
    "api_keys_file": (
        "Headrace's file of keys is TOML, with names and limits.",
        "Use --api-keys-file (api_keys_file); docs/configuration.md has an example.",
    ),
    "otlp_traces_endpoint": (
        "Headrace exports traces as the OTEL_* variables say.",
        "Use --trace (trace), with the variable OTEL_EXPORTER_OTLP_ENDPOINT.",
    ),
    "download_dir": (
        "Headrace keeps models in its cache.",
        "Set the variable HEADRACE_CACHE to a folder.",
    ),
    "hf_token": (
        "Headrace takes the token from the environment.",
        "Set the variable HF_TOKEN.",
    ),
    "seed": (
        "Headrace takes the seed from each request.",
        "Leave it out, and set seed in a request or in SamplingParams.",
    ),
    "temp": (
        "Headrace calls it temperature.",
        "Use --temperature in run and chat; a server takes it from each request.",
    ),
    "predict": (
        "Headrace calls it max_tokens.",
        "Use --max-tokens in run; a server takes it from each request.",
    ),
    "swap_space": TOPICS["offload"],
    "block_size": (
        "Headrace's backends choose the size of a block.",
        "Leave it out; as a library, block_tokens sets it.",
    ),
    "num_gpu_blocks_override": (
        "Headrace's KV pool has its size in tokens or bytes.",
        "Use --kv-tokens or --kv-memory (kv_tokens, kv_memory).",
    ),
    "max_input_tokens": (
        "Headrace has a longest prompt as a setting of the server.",
        "Use --max-prompt-tokens (max_prompt_tokens).",
    ),
    "config": (
        "Headrace's file of settings is TOML.",
        "Use --config FILE; docs/configuration.md has an example.",
    ),
}

# Words that need nothing: Headrace does so anyway. With the reason, for docs/from-other-engines.md.
NEEDLESS: dict[str, str] = {
    "trust_remote_code": "a model's own code is never run",
    "enable_auto_tool_choice": "tools are always there",
    "tool_call_parser": "how a model calls tools is read from its chat template",
    "enable_metrics": "/metrics is always there",
    "metrics": "/metrics is always there",
    "disable_log_requests": "requests are logged in one line, without their text",
    "disable_log_stats": "no statistics are logged",
    "cont_batching": "batching is always continuous",
    "jinja": "chat templates are always rendered",
    "use_tqdm_on_load": "progress is shown at a terminal",
    "flash_attn": "attention never keeps all scores in memory",
    "disable_custom_all_reduce": "there is one GPU",
    "use_v2_block_manager": "there is one way to manage blocks",
    "language_model_only": "only text is served",
}
