"""A `Deployment` as the command line of an engine, for a named version of it.

    emitted = emit(deployment, "vllm")
    print(emitted.text)         # what to run
    print(emitted.notes)        # what this engine can't do, one sentence each

Every value is quoted for a POSIX shell. Knows the tables in core/foreign/; nothing is run.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace

from headrace.core.errors import ConfigError
from headrace.core.foreign.values import Names
from headrace.core.foreign.words import Engine, Word
from headrace.dialects.deployment import Deployment
from headrace.dialects.fields import from_deployment
from headrace.dialects.kubernetes import IMAGES, manifests
from headrace.dialects.modelfile import write_script
from headrace.dialects.read import engine_names, find_engine

KUBERNETES = "k8s"
_MEANINGS = {
    "model_repo": "a model of the hub",
    "tensor_parallel": "tensor parallelism",
    "pipeline_parallel": "pipeline parallelism",
    "replicas": "several replicas",
    "context_tokens": "the length of the context",
    "max_sequences": "the most sequences at one time",
    "max_batch_tokens": "the most tokens of a step",
    "quantization": "the quantization",
    "dtype": "the type of activations",
    "kv_dtype": "the type of keys and values",
    "value_dtype": "the type of values",
    "gpu_memory": "the share of the GPU that all of it may take",
    "gpu_memory_bytes": "the memory of the GPU that all of it may take",
    "static_memory": "the share of the GPU that weights and KV pool may take",
    "kv_fraction": "the KV pool's share of what the weights leave",
    "kv_memory": "the KV pool's size in bytes",
    "kv_tokens": "the KV pool's size in tokens",
    "gpu_layers": "how many layers are on the GPU",
    "prefix_cache": "the prefix cache",
    "chunked_prefill": "computing prompts in chunks",
    "eager": "running without CUDA graphs",
    "speculation": "speculative decoding",
    "speculation.method": "the method of speculation",
    "speculation.draft": "a draft model",
    "speculation.tokens": "how many tokens are proposed",
    "load_format": "random weights",
    "served_model_name": "the name that clients use",
    "revision": "the model's revision",
}
_POOL_SIZES = {"kv_memory", "kv_tokens", "kv_fraction"}
# What to do where an engine has no word: for an engine and a field, or for a field.
_INSTEAD = {
    ("sglang", "gpu_memory"): "--mem-fraction-static counts weights and KV pool alone",
    ("trtllm", "kv_dtype"): "write kv_cache_config: {dtype: ...} into a YAML file for --config",
    ("trtllm", "prefix_cache"): "write kv_cache_config: {enable_block_reuse: ...} into a YAML file "
    "for --config",
    ("trtllm", "eager"): "write cuda_graph_config: null into a YAML file for --config",
    ("trtllm", "quantization"): "serve a checkpoint that is quantized so",
    ("headrace", "revision"): "write it into the model's name: org/name@revision",
    ("headrace", "pipeline_parallel"): "this version has no pipeline stages",
    ("headrace", "speculation"): "it guesses by ngram, suffix or draft:MODEL",
    ("llama.cpp", "quantization"): "the type is that of the GGUF file",
    ("ollama", "quantization"): "the type is that of the GGUF file, or of ollama create --quantize",
    ("", "replicas"): "start that many servers behind a router",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted:
    """`text` is a command, a script (ollama) or manifests (k8s); it holds for that version. Fields
    that the engine has no word for are `left_out`, each with a note; `implied` ones need no word,
    since the engine does so anyway."""

    text: str
    engine: str
    label: str
    version: str
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    implied: tuple[str, ...] = ()

    def shown(self) -> str:
        """The text below its version and notes, as comments."""
        head = [f"{self.label} {self.version}", *(f"note: {note}" for note in self.notes)]
        return "\n".join([*(f"# {line}" for line in head), self.text])


def emit_names() -> tuple[str, ...]:
    """What `emit` takes as its engine."""
    return (*engine_names(), KUBERNETES)


def emit(deployment: Deployment, engine: str, *, of: str = "headrace") -> Emitted:
    """For one of `emit_names()`. `of` is the engine that a k8s Deployment runs: headrace, vllm or
    sglang. Raises ConfigError for an unknown engine, or a text that no command line can hold."""
    _check_texts(deployment)
    if engine == KUBERNETES:
        return _for_kubernetes(deployment, of)
    found = find_engine(engine)
    done = _write(found, deployment)
    if found.name == "ollama":
        text = _ollama_script(done.words, deployment)
    else:
        text = _command(found, done.words, deployment)
    return Emitted(
        text=text,
        engine=engine,
        label=found.label,
        version=found.version,
        notes=tuple(done.notes),
        left_out=tuple(done.left_out),
        implied=tuple(done.implied),
    )


def _check_texts(deployment: Deployment) -> None:
    draft = deployment.speculation.draft if deployment.speculation else None
    for name in ("model", "revision", "served_model_name", "host", "quantization"):
        text = getattr(deployment, name)
        if text is not None and (not text or not text.isprintable() or text.startswith("-")):
            raise _not_writable(name, text)
    if draft is not None and (not draft.isprintable() or draft.startswith("-")):
        raise _not_writable("draft", draft)


def _not_writable(name: str, text: str) -> ConfigError:
    return ConfigError(
        f"{name} is {text!r}; expected some text in one line that does not begin with a dash.",
        f"Give another {name}.",
        param=name,
    )


@dataclass(slots=True)
class _Written:
    """The words of a command line, and the fields that it does not say."""

    words: list[tuple[Word, str]]
    notes: list[str]
    left_out: list[str]
    implied: list[str]
    said: list[str]


def _write(engine: Engine, deployment: Deployment) -> _Written:
    done = _Written([], [], [], [], [])
    given = from_deployment(engine, deployment)
    for field, value in given.items():
        if field in ("model", "model_repo") and engine.model_is_argument:
            continue
        words = list(engine.for_field(field))
        if engine.name == "headrace" and field in _POOL_SIZES and _POOL_SIZES & set(done.said):
            words = []  # only one of them can be said
        said = [(word, text) for word in words if (text := word.kind.write(value)) is not None]
        if said:
            done.words += said
            done.said.append(field)
        elif engine.defaults.get(field) == value:
            done.implied.append(field)
        elif field != "value_dtype":  # as kv_dtype
            done.left_out.append(field)
            done.notes.append(_cannot(engine, field, value, words))
    return _without_half_a_speculation(done)


def _without_half_a_speculation(done: _Written) -> _Written:
    """A draft model without its method would be something else than what was asked for."""
    parts = [field for field in done.left_out if field.startswith("speculation.")]
    if parts:
        done.words = [each for each in done.words if not each[0].field.startswith("speculation.")]
        done.left_out = [field for field in done.left_out if field not in parts] + ["speculation"]
    return done


def _cannot(engine: Engine, field: str, value: object, words: list[Word]) -> str:
    meaning = _MEANINGS.get(field, field)
    instead = _INSTEAD.get((engine.name, field)) or _INSTEAD.get(("", field), "")
    after = f": {instead}" if instead else ""
    if isinstance(value, bool):
        return f"{engine.label} can't turn {meaning} {'on' if value else 'off'} by a flag{after}"
    if words and isinstance(kind := words[0].kind, Names):
        known = ", ".join(dict.fromkeys(str(v) for v in kind.ours.values() if v is not None))
        return f"{engine.label} does not have {value} as {meaning}, but {known}{after}"
    return f"{engine.label} has no flag for {meaning} ({value}){after}"


def _command(engine: Engine, words: list[tuple[Word, str]], deployment: Deployment) -> str:
    parts = [f"{word.flags[0][1:]}={shlex.quote(text)}" for word, text in words if word.is_variable]
    parts.append(engine.commands[0])
    if engine.model_is_argument and deployment.model is not None:
        parts.append(shlex.quote(deployment.model))
    flags = [" ".join(each) for each in _flags(words, quoted=True)]
    return " \\\n  ".join([" ".join(parts), *flags])


def _flags(words: list[tuple[Word, str]], *, quoted: bool) -> Iterator[list[str]]:
    for word, text in words:
        if not word.is_variable:
            value = shlex.quote(text) if quoted else text
            yield [word.flags[0]] if word.is_switch else [word.flags[0], value]


def _ollama_script(words: list[tuple[Word, str]], deployment: Deployment) -> str:
    lines = [(w.flags[0][1:], text) for w, text in words if w.flags[0].startswith("%")]
    variables = [(w.flags[0][1:], text) for w, text in words if w.is_variable]
    name = deployment.served_model_name or "model"
    return write_script(lines, variables, name)


def _for_kubernetes(deployment: Deployment, of: str) -> Emitted:
    if of not in IMAGES:
        raise ConfigError(
            f"A k8s Deployment of {of!r} can't be written; expected {', '.join(IMAGES)}.",
            "Choose one of them.",
            param="of",
        )
    engine = find_engine(of)
    alone = replace(deployment, replicas=1, host=None, port=None)  # the manifests have these
    done = _write(engine, alone)
    arguments = [deployment.model] if engine.model_is_argument and deployment.model else []
    arguments += [part for each in _flags(done.words, quoted=False) for part in each]
    return Emitted(
        text=manifests(engine, deployment, arguments),
        engine=KUBERNETES,
        label=f"Kubernetes, {engine.label}",
        version=engine.version,
        notes=tuple(done.notes),
        left_out=tuple(done.left_out),
        implied=tuple(done.implied),
    )
