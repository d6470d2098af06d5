"""A setting as the exact flag of an engine, with the version of the engine that has it so.

The words are dialects/'s, which were read from each engine's source. An engine that has no word for
a setting gets a sentence that says so, never a guess.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.dialects.deployment import Deployment
from headrace.dialects.read import engine_names, find_engine
from headrace.dialects.write import emit
from headrace.doctor.observation import Observation

_MEANINGS = {
    "max_sequences": "the most sequences at one time",
    "max_batch_tokens": "the most tokens of a step",
    "context_tokens": "the longest context",
    "kv_dtype": "the type of keys and values",
    "prefix_cache": "the prefix cache",
    "gpu_memory": "the engine's share of the GPU",
    "kv_tokens": "the KV pool's size",
    "kv_fraction": "the KV pool's share of what the weights leave",
    "static_memory": "the share of weights and KV pool",
    "quantization": "quantized weights",
    "tensor_parallel": "tensor parallelism",
    "eager": "CUDA graphs",
    "chunked_prefill": "chunks of prompts",
}
# Which field makes the KV pool larger, and what to set it to, by engine.
_POOL = {
    "headrace": ("kv_fraction", 0.9),
    "vllm": ("gpu_memory", 0.92),
    "sglang": ("static_memory", 0.9),
    "lmdeploy": ("kv_fraction", 0.9),
    "trtllm": ("kv_fraction", 0.95),
}
# What no field of a deployment says. tests/doctor looks every flag up in core/foreign/.
WORDS: dict[tuple[str, str], str] = {
    ("vllm", "attention"): "--attention-backend FLASH_ATTN, or a newer vLLM that chooses it itself",
    (
        "sglang",
        "attention",
    ): "--attention-backend fa3 on Hopper, else --attention-backend flashinfer",
    ("llama.cpp", "attention"): "--flash-attn on",
    ("ollama", "attention"): "$OLLAMA_FLASH_ATTENTION=1",
    ("vllm", "capture"): "--max-cudagraph-capture-size 64",
    ("sglang", "capture"): "--cuda-graph-max-bs-decode 64",
    ("headrace", "speculation"): "start it with --speculate off",
    ("vllm", "speculation"): "leave --speculative-config out",
    ("sglang", "speculation"): "leave --speculative-algorithm out",
    ("llama.cpp", "speculation"): "leave --spec-type and -md out",
    ("tgi", "speculation"): "leave --speculate out",
    ("vllm", "processes"): "--api-server-count 4",
    ("sglang", "processes"): "--tokenizer-worker-num 4 --stream-interval 4",
    ("tgi", "processes"): "--validation-workers 4",
    ("headrace", "processes"): "replicas behind a router: a server has one API process",
    ("vllm", "grammar"): '--structured-outputs-config \'{"backend": "guidance"}\'; the same schema '
    "text each time",
    ("sglang", "grammar"): "--grammar-backend llguidance; the same schema text each time",
    ("headrace", "grammar"): "a simpler schema: no patterns with counted repetitions",
    ("tgi", "delay"): "--waiting-served-ratio 0 --max-waiting-tokens 0",
    ("triton", "delay"): "dynamic_batching { max_queue_delay_microseconds: 0 } in config.pbtxt, or "
    "inflight batching",
    ("llama.cpp", "hybrid"): "--swa-full, and --ctx-checkpoints for recurrent layers",
    ("vllm", "hybrid"): "--mamba-cache-mode align",
}
_WAITING = {
    "headrace": "--max-waiting-requests {count}",
    "sglang": "--max-queued-requests {count}",
    "tgi": "--max-concurrent-requests {count}",
}


def setting(seen: Observation, **fields: object) -> str:
    """One or several fields of a `Deployment`, as this engine's flags."""
    name = seen.engine.name
    if name not in engine_names():
        wanted = ", ".join(
            f"{_MEANINGS.get(field, field)}: {_shown(value)}" for field, value in fields.items()
        )
        return f"set {wanted} (this engine's flags are not known here)"
    engine = find_engine(name)
    emitted = emit(replace(Deployment(), **fields), name)  # type: ignore[arg-type]
    said = [line.strip(" \\") for line in emitted.text.splitlines()]
    flags = [line for line in said if line.startswith(("-", "PARAMETER"))]
    for line in said:
        flags += [part for part in line.split() if "=" in part and part[0].isupper()]
    words = [" ".join(flags)] if flags else []
    words += [_implied(engine.name, field, fields[field]) for field in emitted.implied]
    words += list(emitted.notes)
    return f"{'; '.join(words)}  ({engine.label} {engine.version})"


def _implied(name: str, field: str, value: object) -> str:
    """What the engine does anyway: the flag that turned it off has to go."""
    engine = find_engine(name)
    off = [
        word.flags[0]
        for word in engine.for_field(field)
        if isinstance(value, bool) and word.kind.write(not value) is not None
    ]
    if off:
        return f"leave {off[0]} out: {_MEANINGS.get(field, field)} is on by default"
    return f"{_MEANINGS.get(field, field)}: {_shown(value)} is the default; nothing to set"


def word(seen: Observation, topic: str, otherwise: str) -> str:
    """This engine's own word for what has no common name."""
    found = WORDS.get((seen.engine.name, topic))
    if found is None:
        return otherwise
    if seen.engine.name not in engine_names():
        return found
    engine = find_engine(seen.engine.name)
    return f"{found}  ({engine.label} {engine.version})"


def larger_pool(seen: Observation) -> str:
    """More of the memory for keys and values."""
    if seen.engine.name == "headrace" and str(seen.config.get("device", "")) in ("cpu", ""):
        tokens = seen.number("kv_tokens")
        if tokens is not None:
            return setting(seen, kv_tokens=int(tokens * 4))
    if seen.engine.name in _POOL:
        field, value = _POOL[seen.engine.name]
        now = seen.number(field)
        if now is None or now < value:
            return setting(seen, **{field: value})
        return "the engine has all the memory it may take: more GPUs, or fewer bytes a token"
    if seen.engine.name in ("llama.cpp", "ollama"):
        context = seen.number("context_tokens")
        if context is not None:
            return setting(seen, context_tokens=int(context) * 2)
    tokens = seen.number("kv_tokens")
    if seen.engine.name == "tgi" and tokens is not None:
        return setting(seen, kv_tokens=int(tokens * 2))
    return setting(seen, kv_tokens=int(tokens * 2) if tokens else 65_536)


def places(seen: Observation, count: int) -> str:
    """So many sequences at one time. llama.cpp's context is that of all slots together."""
    context = seen.number("context_tokens")
    if seen.engine.name == "llama.cpp" and context is not None:
        return setting(seen, max_sequences=count, context_tokens=int(context))
    return setting(seen, max_sequences=count)


def waiting_limit(seen: Observation, count: int) -> str:
    flag = _WAITING.get(seen.engine.name)
    if flag is None:
        return (
            f"{seen.engine.label} has no limit of its own: let the gateway answer 429 above {count}"
        )
    engine = find_engine(seen.engine.name)
    return f"{flag.format(count=count)}  ({engine.label} {engine.version})"


def narrow_kv(seen: Observation) -> str:
    """Keys and values in 8 bits."""
    kind = "q8_0" if seen.engine.name in ("llama.cpp", "ollama") else "fp8"
    if seen.engine.name == "headrace" and str(seen.config.get("device", "")) in ("cpu", ""):
        kind = "int8"
    return setting(seen, kv_dtype=kind)


def _shown(value: object) -> str:
    return (
        {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value)
    )
