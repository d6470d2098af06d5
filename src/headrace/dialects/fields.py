"""What several of an engine's words say together, as fields of a `Deployment`, and back.

Most words set one field alone. Here are those that don't: llama.cpp's context is that of all slots,
SGLang's chunk can be off, speculation is spread over several flags.
"""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

from headrace.core.foreign.speculation import Speculation
from headrace.core.foreign.words import Engine
from headrace.dialects.deployment import Deployment

_KNOWN = frozenset(each.name for each in fields(Deployment))
_ALWAYS_A_NUMBER = ("tensor_parallel", "pipeline_parallel", "replicas")
_FILE_TYPE = re.compile(r"(?P<repo>[^:]+/[^:]+):(?P<type>[\w.-]+)")
_GGUF_TYPE = re.compile(r"(iq|q|tq)\d\w*|bf16|f16|f32|mxfp4\w*")
# Engines that have no word for the method: TGI looks the tokens up, Ollama uses heads of the model.
_METHOD_WITHOUT_DRAFT = {"tgi": "ngram", "ollama": "mtp"}
_FP8 = ("fp8", "fp8_e5m2")
_SLOTS = 4  # llama-server's where -np is not given; they share one context


def to_deployment(engine: Engine, values: dict[str, object]) -> tuple[Deployment, tuple[str, ...]]:
    """The deployment, and notes on what is different from what one might expect."""
    found: dict[str, Any] = dict(values)
    notes: list[str] = []
    if isinstance(said := found.get("speculation"), Speculation):
        tokens = found.pop("speculation.tokens", None)
        found["speculation"] = said if tokens is None else replace(said, tokens=tokens)
    elif engine.name != "headrace":  # its bound on drafts is a bound alone
        found["speculation"] = _speculation(engine, found)
    if (chunk := found.pop("chunk_tokens", None)) is not None:
        if chunk > 0:
            found["max_batch_tokens"] = chunk
        else:
            found["chunked_prefill"] = False
    if isinstance(found.get("gpu_memory"), int):
        found["gpu_memory_bytes"] = found.pop("gpu_memory")
    if (address := found.pop("address", None)) is not None:
        host, _, port = str(address).rpartition(":")
        found |= {"host": host or None, "port": int(port)} if port.isdigit() else {"host": address}
    if found.get("dtype") == "fp8":
        found["dtype"] = None
        found["quantization"] = found.get("quantization") or "fp8"
        notes.append(
            f"{engine.label} has no --dtype fp8; it is read as --quantization fp8, which quantizes "
            "the weights"
        )
    if engine.name == "llama.cpp":
        _read_llama(found, notes)
    for name in _ALWAYS_A_NUMBER:
        if found.get(name) is None:
            found.pop(name, None)
    return Deployment(**{name: found[name] for name in found if name in _KNOWN}), tuple(notes)


def _method_without_a_word(engine: Engine, draft: object) -> str:
    """What an engine does where tokens or a draft model are given, and no method."""
    return "draft" if draft is not None else _METHOD_WITHOUT_DRAFT.get(engine.name, "ngram")


def _speculation(engine: Engine, found: dict[str, Any]) -> Speculation | None:
    method = found.pop("speculation.method", None)
    draft = found.pop("speculation.draft", None)
    tokens = found.pop("speculation.tokens", None)
    window = found.pop("speculation.window", None)
    if method in (None, "none") and draft is None and not tokens:
        return None
    if tokens is None and window is not None:
        tokens = window - 1
    if method is None:
        method = _method_without_a_word(engine, draft)
    return Speculation(method=method, draft=draft, tokens=tokens)


def _read_llama(found: dict[str, Any], notes: list[str]) -> None:
    if (repo := found.pop("model_repo", None)) is not None:
        match = _FILE_TYPE.fullmatch(repo)
        found["model"] = match["repo"] if match else repo
        if match:
            found["quantization"] = match["type"].lower()
    context = found.pop("all_context_tokens", None)
    slots = found.get("max_sequences")
    shares = found.pop("shares_context", slots is None)
    if context is not None and shares:
        found |= {"context_tokens": context, "kv_tokens": context}
        notes.append(
            f"all {slots or _SLOTS} slots share the {context:,} tokens of -c: together they hold "
            "no more"
        )
    elif context is not None:
        found["context_tokens"] = context // (slots or _SLOTS)
        if (slots or _SLOTS) > 1:
            notes.append(
                f"-c is divided by the {slots or _SLOTS} slots of -np: each has "
                f"{found['context_tokens']:,} tokens"
            )
    value_type = found.pop("value_dtype", None)
    if (value_type or "f16") != (found.get("kv_dtype") or "f16"):
        notes.append(
            f"keys are {found.get('kv_dtype') or 'f16'} and values {value_type or 'f16'}: both are "
            "counted as the keys"
        )
    split = found.pop("tensor_split", None)
    mode = found.pop("split_mode", "layer")
    if split is not None and (gpus := len(str(split).split(","))) > 1 and mode != "none":
        found["pipeline_parallel" if mode == "layer" else "tensor_parallel"] = gpus
        if len({share.strip() for share in str(split).split(",")}) > 1:
            notes.append(f"the shares of -ts ({split}) are counted as even")


def from_deployment(engine: Engine, deployment: Deployment) -> dict[str, object]:
    """The fields that are not as they are by default, as the engine's words have them."""
    given: dict[str, object] = {
        each.name: value
        for each in fields(Deployment)
        if (value := getattr(deployment, each.name)) is not None and value != each.default
    }
    if engine.name == "sglang":
        _write_sglang(given, deployment)
    if engine.name == "llama.cpp":
        _write_llama(given, deployment)
    needs_pytorch = {"eager", "speculation"} & given.keys() or str(deployment.kv_dtype) in _FP8
    if engine.name == "lmdeploy" and needs_pytorch:  # TurboMind, the default, has none of these
        given["lmdeploy_engine"] = "pytorch"
    if engine.name == "ollama" and deployment.port is not None:
        host = given.pop("host", None) or "127.0.0.1"
        given["address"] = f"{host}:{given.pop('port')}"
    if isinstance(spec := given.get("speculation"), Speculation) and not any(
        engine.for_field("speculation")
    ):
        del given["speculation"]
        given |= _speculation_parts(engine, spec)
    return given


def _speculation_parts(engine: Engine, spec: Speculation) -> dict[str, object]:
    parts: dict[str, object] = {"speculation.method": spec.method}
    needs_no_word = engine.name in _METHOD_WITHOUT_DRAFT and (spec.draft or spec.tokens)
    if needs_no_word and spec.method == _method_without_a_word(engine, spec.draft):
        del parts["speculation.method"]
    if spec.draft is not None:
        parts["speculation.draft"] = spec.draft
    if spec.tokens is not None:
        has_window = any(engine.for_field("speculation.window"))
        name = "speculation.window" if has_window else "speculation.tokens"
        parts[name] = spec.tokens + has_window
    return parts


def _write_sglang(given: dict[str, object], deployment: Deployment) -> None:
    if "max_batch_tokens" in given and deployment.chunked_prefill is not False:
        given["chunk_tokens"] = given.pop("max_batch_tokens")
    if deployment.chunked_prefill is False:
        del given["chunked_prefill"]
        given["chunk_tokens"] = -1


def _write_llama(given: dict[str, object], deployment: Deployment) -> None:
    model = deployment.model
    if model is not None and not model.endswith(".gguf"):
        del given["model"]
        given["model_repo"] = model
        if _GGUF_TYPE.fullmatch(deployment.quantization or ""):
            given["model_repo"] = f"{model}:{str(given.pop('quantization')).upper()}"
    context, slots = deployment.context_tokens, deployment.max_sequences
    if context is not None:
        del given["context_tokens"]
        if deployment.kv_tokens == context:  # one context for all slots
            given["all_context_tokens"] = given.pop("kv_tokens")
            given["shares_context"] = True
        else:
            given["all_context_tokens"] = context * (slots or 1)
            given["max_sequences"] = slots or 1
    if deployment.kv_dtype is not None:
        given["value_dtype"] = deployment.kv_dtype
    gpus = deployment.gpus
    if gpus > 1 and 1 in (deployment.tensor_parallel, deployment.pipeline_parallel):
        by_layer = deployment.pipeline_parallel > 1
        given.pop("pipeline_parallel" if by_layer else "tensor_parallel")
        given["split_mode"] = "layer" if by_layer else "tensor"
        given["tensor_split"] = ",".join(["1"] * gpus)
