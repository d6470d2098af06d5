"""What another engine's word means to Headrace: settings to make, nothing to do, or an answer.

    understand(word, "8192", "--max-model-len 8192")    ->  {"context_tokens": 8192}
    understand(word, "2", "--tensor-parallel-size 2")   ->  ConfigError: one GPU; what to do instead

Where the meaning is the same the value is converted; where Headrace does so anyway, nothing is
set; everything else is an error that names our word or says what to do. Never imported before a
word is met that is not our own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from headrace.core.config import KvDtype, Policy, Quantization
from headrace.core.errors import ConfigError
from headrace.core.foreign.engines import ENGINES
from headrace.core.foreign.llama_cpp import LLAMA_CPP
from headrace.core.foreign.speculation import Speculation, SpeculationJson
from headrace.core.foreign.topics import NEEDLESS, OWN_ANSWERS, TOPICS
from headrace.core.foreign.values import Fixed, Names
from headrace.core.foreign.words import Engine, Word, plain

Settings = dict[str, object]
# Fields that are settings of ours, under the same name, with the same meaning.
_SAME = frozenset(
    {
        "context_tokens", "max_sequences", "max_batch_tokens", "gpu_memory", "kv_fraction",
        "kv_memory", "kv_tokens", "prefix_cache", "threads", "host", "port", "served_model_name",
        "api_key", "log_level", "cors_origin", "max_logprobs", "drain_timeout_s", "load_format",
        "generation_config", "model", "device", "policy", "kv_dtype", "quantization",
    }
)  # fmt: skip
# Letters that mean something else to vLLM, where few know them.
_BETTER_KNOWN: dict[str, tuple[Engine, ...]] = {"-n": (LLAMA_CPP,), "-r": (LLAMA_CPP,)}
_ALL_LAYERS = 99  # what people write for "all of them"
# Our values of the settings in SHARED_NAMES, which others have with values of their own.
SHARED = {
    "quantization": tuple(Quantization),
    "load_format": ("auto", "dummy"),
    "generation_config": ("auto", "none"),
    "policy": tuple(Policy),
}


def find_flag(flag: str) -> tuple[Word, bool] | None:
    """Another engine's word, by its flag, and whether the flag says no."""
    for engine in (*_BETTER_KNOWN.get(flag, ()), *ENGINES.values()):
        if found := engine.find(flag):
            return found
    return None


def find_keyword(name: str) -> tuple[Word, bool] | None:
    """By its name in a program, a file or a variable: max_model_len."""
    if word := _keywords().get(name.replace("-", "_")):
        return word, False
    return None


@cache
def _keywords() -> dict[str, Word]:
    found: dict[str, Word] = {}
    for engine in ENGINES.values():
        for word in engine.words:
            for flag in word.flags:
                if flag.startswith("--") and not flag.startswith("--no-"):
                    found.setdefault(plain(flag), word)
    return found


def understand(word: Word, value: object, written: str) -> Settings:
    """Our settings for another engine's word. `value` is None for a flag without one; `written` is
    the word with its value, as the user wrote them."""
    if word.name in NEEDLESS or (not word.field and _asks_for_nothing(word, value)):
        return {}
    if word.name in OWN_ANSWERS:
        raise _answer(written, *OWN_ANSWERS[word.name])
    if not word.field:
        raise _answer(written, *TOPICS[word.topic])
    field, kind = word.field, word.kind
    flag = written.split()[0].partition("=")[0]
    if "." in flag and isinstance(kind, SpeculationJson):
        part = kind.part(flag)
        if part is None:
            raise _answer(written, *TOPICS["speculation"])
        field, kind = part
    try:
        read = kind.read(value)
    except ValueError as error:
        raise ConfigError(
            f"{written}: the value is {value!r}; expected {error}.",
            "Correct it.",
            param=word.name,
        ) from error
    return settle(field, read, written)


def shared_value(name: str, value: object, written: str) -> Settings | None:
    """Our settings where a word is both ours and theirs and the value is theirs; None for a value
    of ours, or one that nobody has. None, in a program, is what others have as their default."""
    if value is None and name in SHARED:
        return {}
    if not isinstance(value, str) or name not in SHARED or value in SHARED[name]:
        return None
    for engine in ENGINES.values():
        for word in engine.words:
            kind = word.kind
            if word.name == name and word.field and isinstance(kind, Names) and value in kind.ours:
                return settle(word.field, kind.read(value), written)
    return None


def settle(field: str, value: Any, written: str) -> Settings:
    """Our settings for a field of a deployment."""
    if value is None:
        return {}  # left to the engine
    if rule := _RULES.get(field):
        return rule(value, written)
    if field in _SAME:
        return {field: value}
    raise _answer(written, *OWN_ANSWERS[field])


def _asks_for_nothing(word: Word, value: object) -> bool:
    """A feature that Headrace does not have is turned off, or left to the engine."""
    if isinstance(word.kind, Fixed):
        return value is not None and str(value).lower() in ("0", "false", "no", "off")
    return word.name != "seed" and (
        value is None or str(value).lower() in ("", "0", "0.0", "auto", "none", "false", "[]", "{}")
    )


def _answer(written: str, because: str, remedy: str) -> ConfigError:
    return ConfigError(f"{written}: {because}", remedy)


def _count(name: str) -> Callable[[int, str], Settings]:
    return lambda value, written: {} if value == 1 else {name: value}


def _kv_type(value: str, written: str) -> Settings:
    if value in tuple(KvDtype):
        return {"kv_dtype": value}
    raise _answer(
        written,
        f"Headrace keeps keys and values as {', '.join(KvDtype)}.",
        "Use --kv-dtype (kv_dtype) with one of them.",
    )


def _quantization(value: str, written: str) -> Settings:
    if value in tuple(Quantization):
        return {"quantization": value}
    return {}  # a checkpoint says itself how it is quantized


def _dtype(value: str, written: str) -> Settings:
    if value == "fp8":
        raise _answer(
            written,
            "fp8 is no type of activations.",
            "Use --quantization fp8 (quantization='fp8'), which quantizes the layers.",
        )
    raise _answer(
        written,
        "Headrace chooses the type that it computes in: on a GPU bf16.",
        "Leave it out; --kv-dtype (kv_dtype) sets the type of keys and values, and --quantization "
        "that of the layers.",
    )


def _chunks(value: bool, written: str) -> Settings:
    if value:
        return {}
    raise _answer(
        written,
        "Headrace computes prompts in chunks of at most --max-batch-tokens (max_batch_tokens).",
        "Set that to the length of the context to compute each prompt in one step.",
    )


def _chunk_tokens(value: int, written: str) -> Settings:
    return {"max_batch_tokens": value} if value > 0 else _chunks(False, written)


def _layers(value: int, written: str) -> Settings:
    if value == 0:
        return {"device": "cpu"}
    if value >= _ALL_LAYERS:
        return {}
    raise _answer(
        written,
        "Headrace has all layers on the GPU, or none.",
        "Leave it out for a GPU, or use --device cpu (device='cpu').",
    )


def _policy(value: str, written: str) -> Settings:
    if value in tuple(Policy):
        return {"policy": value}
    raise _answer(
        written,
        f"Headrace's order of waiting requests is one of {', '.join(Policy)}.",
        "Use --policy (policy) with one of them.",
    )


def _load_format(value: str, written: str) -> Settings:
    if value in ("auto", "dummy"):
        return {"load_format": value}
    raise _answer(written, *TOPICS["loading"])


def _speculation(value: Speculation, written: str) -> Settings:
    """All that vLLM's JSON says."""
    tokens = {} if value.tokens is None else {"max_draft_tokens": value.tokens}
    if value.method == "draft" and value.draft is not None:
        return {"speculate": f"draft:{value.draft}", **tokens}
    return {**_speculation_method(value.method, written), **tokens}


def _speculation_method(value: str, written: str) -> Settings:
    if value in ("ngram", "suffix"):
        return {"speculate": value}
    if value == "none":
        return {"speculate": "off"}
    if value == "draft":
        raise _answer(
            written,
            "Headrace takes the draft model with the method.",
            "Use --speculate draft:MODEL (speculate).",
        )
    raise _answer(
        written,
        "Headrace guesses from text that it has seen, or with a draft model, and has no heads.",
        "Use --speculate auto, ngram, suffix or draft:MODEL (speculate).",
    )


def _log_level(value: str, written: str) -> Settings:
    return {"log_level": {"trace": "debug", "critical": "error"}.get(value.lower(), value.lower())}


_RULES: Mapping[str, Callable[[Any, str], Settings]] = {
    "tensor_parallel": _count("tensor_parallel"),
    "pipeline_parallel": _count("pipeline_parallel"),
    "replicas": _count("replicas"),
    "kv_dtype": _kv_type,
    "value_dtype": _kv_type,
    "quantization": _quantization,
    "dtype": _dtype,
    "chunked_prefill": _chunks,
    "chunk_tokens": _chunk_tokens,
    "gpu_layers": _layers,
    "policy": _policy,
    "load_format": _load_format,
    "log_level": _log_level,
    "speculation": _speculation,
    "speculation.method": _speculation_method,
    "speculation.draft": lambda value, written: {"speculate": f"draft:{value}"},
    "speculation.tokens": lambda value, written: {"max_draft_tokens": value},
    "speculation.window": lambda value, written: {"max_draft_tokens": max(1, value - 1)},
    "eager": lambda value, written: {"graphs": "off"} if value else {},
    "shares_context": lambda value, written: {},
}
