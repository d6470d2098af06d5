"""Headrace's own words, in the form in which the other engines' are kept."""

from __future__ import annotations

from functools import cache

from headrace.core.drafter import Method, read_drafter
from headrace.core.errors import ConfigError
from headrace.core.foreign.speculation import Speculation
from headrace.core.foreign.values import COUNT, OFF, ON, SHARE, TEXTS, Names
from headrace.core.foreign.words import Engine, Word, sets
from headrace.core.settings import all_settings
from headrace.core.sizes import parse_bytes, parse_share
from headrace.core.version import headrace_version

_SAME = Names({word: word for word in ("fp8", "int8", "int4")} | {"none": None})
_KV_TYPES = Names({word: word for word in ("bf16", "f16", "f32", "fp8", "int8")})


class Memory:
    """--gpu-memory: a share of the GPU, or a size."""

    def read(self, value: object) -> float | int:
        return parse_share(str(value), "gpu_memory")

    def write(self, value: object) -> str | None:
        return str(value)


class Size:
    """A number of bytes, or 4GiB."""

    def read(self, value: object) -> int:
        return parse_bytes(str(value), "kv_memory")

    def write(self, value: object) -> str | None:
        return str(value)


class OwnSpeculation:
    """--speculate: ngram, suffix, draft:MODEL and so on."""

    def read(self, value: object) -> Speculation | None:
        drafter = read_drafter(str(value), "speculate", ConfigError)
        if drafter.method is Method.OFF:
            return None
        return Speculation(method=drafter.method, draft=drafter.model or None)

    def write(self, value: object) -> str | None:
        assert isinstance(value, Speculation)
        if value.method == Method.DRAFT:
            return None if value.draft is None else f"draft:{value.draft}"
        words = (Method.AUTO, Method.NGRAM, Method.SUFFIX)
        return value.method if value.method in words and value.draft is None else None


class OwnDraftTokens:
    """--max-draft-tokens, where the method can be said too."""

    def read(self, value: object) -> object:
        return COUNT.read(value)

    def write(self, value: object) -> str | None:
        assert isinstance(value, Speculation)
        says = OwnSpeculation().write(value) is not None and value.tokens is not None
        return str(value.tokens) if says else None


_FIELDS = (
    sets("--model -m", "model"),
    sets("--context-tokens", "context_tokens", COUNT),
    sets("--max-sequences", "max_sequences", COUNT),
    sets("--max-batch-tokens", "max_batch_tokens", COUNT),
    sets("--gpu-memory", "gpu_memory", Memory()),
    sets("--gpu-memory", "gpu_memory_bytes", Memory()),
    sets("--kv-fraction", "kv_fraction", SHARE),
    sets("--kv-memory", "kv_memory", Size()),
    sets("--kv-tokens", "kv_tokens", COUNT),
    sets("--tensor-parallel", "tensor_parallel", COUNT),
    sets("--replicas", "replicas", COUNT),
    sets("--quantization", "quantization", _SAME),
    sets("--kv-dtype", "kv_dtype", _KV_TYPES),
    sets("--prefix-cache", "prefix_cache", ON),
    sets("--no-prefix-cache", "prefix_cache", OFF),
    sets("--graphs", "eager", Names({"off": True, "start": False, "lazy": False})),
    sets("--speculate", "speculation", OwnSpeculation()),
    sets("--max-draft-tokens", "speculation.tokens", COUNT, written=False),
    sets("--max-draft-tokens", "speculation", OwnDraftTokens()),
    sets("--load-format", "load_format", Names({"auto": None, "dummy": "dummy"})),
    sets("--served-model-name", "served_model_name", TEXTS),
    sets("--host", "host"),
    sets("--port", "port", COUNT),
)


def _others() -> tuple[Word, ...]:
    known = {flag for word in _FIELDS for flag in word.flags}
    return tuple(
        Word(flags=(setting.flag,), kind=ON if setting.is_bool else TEXTS, topic="other")
        for setting in all_settings()
        if setting.flag not in known
    )


@cache
def own() -> Engine:
    return Engine(
        name="headrace",
        label="Headrace",
        version=headrace_version(),
        source="core/config.py, core/server_config.py",
        commands=("headrace serve",),
        words=(*_FIELDS, *_others()),
        model_is_argument=True,
        defaults={
            "prefix_cache": True, "chunked_prefill": True, "eager": False, "gpu_memory": 0.9,
            "port": 8000, "host": "127.0.0.1", "tensor_parallel": 1, "pipeline_parallel": 1,
            "replicas": 1,
        },
    )  # fmt: skip
