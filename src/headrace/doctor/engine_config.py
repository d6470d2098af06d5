"""What an engine says about its own settings, in our words; what it does not tell is absent.

Sources, each read by its own function: labels of metrics (vLLM, TensorRT-LLM, LMDeploy), SGLang's
/get_server_info, TGI's /info, llama.cpp's /props and /slots, Ollama's /api/ps, Headrace's /version,
and /v1/models. Fields: those of dialects/deployment.py where there is one, and max_waiting,
block_tokens, spilled_share, reserves_context, is_hybrid, policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.doctor.endpoint import Endpoint
from headrace.doctor.observation import EngineId
from headrace.doctor.scrape import Reading

_NOTHING = ("", "None", "none", "null", "auto", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    engine: EngineId
    model: str | None = None
    config: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def ask_config(endpoint: Endpoint, reading: Reading | None) -> Told:
    """Asks what this engine has; an endpoint that is not there leaves its fields out."""
    names = reading.names if reading is not None else None
    models = endpoint.found("/v1/models")
    model, context = _model(models)
    name = names.engine if names is not None else _without_metrics(endpoint)
    label = names.label if names is not None else {"ollama": "Ollama"}.get(name, "unknown engine")
    found: dict[str, object] = {} if context is None else {"context_tokens": context}
    if reading is not None:
        found |= from_labels(name, reading)
    version: str | None = None
    notes: list[str] = []
    reader = _READERS.get(name)
    if reader is not None:
        more, version, told = reader(endpoint)
        found |= {key: value for key, value in more.items() if value is not None}
        model = model or told
    if name == "headrace" and "max_sequences" not in found:
        notes.append("/version shows settings to operators only: give the operator's key")
    return Told(
        engine=EngineId(name=name, label=label, version=version),
        model=model,
        config={key: value for key, value in found.items() if value is not None},
        notes=tuple(notes),
    )


def from_labels(engine: str, reading: Reading) -> dict[str, object]:
    """vLLM's cache_config_info, which Headrace has too, and SGLang's and TensorRT's gauges."""
    found: dict[str, object] = {}
    labels = next(
        (each for name, each in reading.info.items() if name.endswith("cache_config_info")), None
    )
    if labels is not None:
        blocks, size = _number(labels.get("num_gpu_blocks")), _number(labels.get("block_size"))
        found["block_tokens"] = size
        found["kv_tokens"] = _number(labels.get("kv_cache_size_tokens")) or (
            blocks * size if blocks and size else None
        )
        found["prefix_cache"] = _truth(labels.get("enable_prefix_caching"))
        found["kv_dtype"] = _text(labels.get("cache_dtype"))
        if engine == "vllm":
            found["gpu_memory"] = _share(labels.get("gpu_memory_utilization"))
        if engine == "headrace":  # which has them beside vLLM's labels
            found["max_sequences"] = _number(labels.get("max_num_seqs"))
            found["context_tokens"] = _number(labels.get("max_model_len"))
    if "places" in reading.levels:
        found["max_sequences"] = int(reading.levels["places"])
    if "kv_tokens" in reading.levels:
        found["kv_tokens"] = int(reading.levels["kv_tokens"])
    if reading.has_adapters:
        found["adapters"] = True
    if "state_usage" in reading.levels:
        found["is_hybrid"] = True
    return {key: value for key, value in found.items() if value is not None}


_Read = tuple[dict[str, object], str | None, str | None]  # fields, version, model


def _headrace(endpoint: Endpoint) -> _Read:
    return told_by_headrace(endpoint.found("/version"))


def told_by_headrace(version: object) -> _Read:
    """From what /version answers; the server that diagnoses itself has it at hand."""
    told = _object(version)
    config = _object(told.get("config"))
    engine, server = _object(config.get("engine")), _object(config.get("server"))
    fields = {
        name: engine.get(name)
        for name in ("max_sequences", "max_batch_tokens", "kv_dtype", "quantization", "policy",
                     "device", "prefix_cache", "max_step_growth")
    }  # fmt: skip
    identity = _object(told.get("identity"))
    fields = {name: value for name, value in fields.items() if value not in (None, "none")}
    fields["device"] = _object(identity.get("backend")).get("name") or fields.get("device")
    fields["kv_dtype"] = identity.get("kv_dtype") or fields.get("kv_dtype")
    formats = _object(identity.get("quantization"))
    if formats and "quantization" not in fields:
        fields["quantization"] = max(formats, key=lambda name: formats[name])
    for name in ("context_tokens", "kv_tokens"):
        fields[name] = told.get(name)
    for name in ("max_batch_tokens", "max_step_growth"):  # what became of those that were not set
        fields[name] = told.get(name) or fields.get(name)
    fields["max_waiting"] = server.get("max_waiting_requests")
    fields["fingerprint"] = told.get("fingerprint")
    if told.get("speculate") not in (None, "off"):
        fields["speculation"] = str(told.get("speculate"))
    if fields.get("device") not in (None, "cpu", "reference"):
        fields["gpu_memory"] = engine.get("gpu_memory")
    if engine.get("graphs") == "off":
        fields["eager"] = True
    return fields, _text(told.get("version")), None


def _vllm(endpoint: Endpoint) -> _Read:
    return {}, _text(_object(endpoint.found("/version")).get("version")), None


def _sglang(endpoint: Endpoint) -> _Read:
    told = _object(endpoint.found("/get_server_info") or endpoint.found("/server_info"))
    chunk = told.get("chunked_prefill_size")
    off = told.get("disable_radix_cache")
    eager = told.get("disable_cuda_graph")
    fields: dict[str, object] = {
        "context_tokens": told.get("context_length"),
        "max_sequences": told.get("max_running_requests"),
        "kv_tokens": told.get("max_total_num_tokens"),
        "max_batch_tokens": chunk if isinstance(chunk, int) and chunk > 0 else None,
        "static_memory": told.get("mem_fraction_static"),
        "tensor_parallel": told.get("tp_size"),
        "kv_dtype": _text(told.get("kv_cache_dtype")),
        "quantization": _text(told.get("quantization")),
        "dtype": _text(told.get("dtype")),
        "prefix_cache": None if not isinstance(off, bool) else not off,
        "eager": eager if isinstance(eager, bool) else None,
        "speculation": _text(told.get("speculative_algorithm")),
        "block_tokens": told.get("page_size"),
        "max_waiting": told.get("max_queued_requests"),
    }
    return fields, _text(told.get("version")), _text(told.get("model_path"))


def _tgi(endpoint: Endpoint) -> _Read:
    told = _object(endpoint.found("/info"))
    fields: dict[str, object] = {
        "context_tokens": told.get("max_total_tokens"),
        "kv_tokens": told.get("max_batch_total_tokens"),
        "max_sequences": told.get("max_batch_size"),
        "max_batch_tokens": told.get("max_batch_prefill_tokens"),
        "max_waiting": told.get("max_concurrent_requests"),
        "dtype": (_text(told.get("model_dtype")) or "").removeprefix("torch.") or None,
        "waiting_served_ratio": told.get("waiting_served_ratio"),
        "max_waiting_tokens": told.get("max_waiting_tokens"),
    }
    return fields, _text(told.get("version")), _text(told.get("model_id"))


def _llama_cpp(endpoint: Endpoint) -> _Read:
    told = _object(endpoint.found("/props"))
    slots = endpoint.found("/slots")
    settings = _object(told.get("default_generation_settings"))
    count = told.get("total_slots") or (len(slots) if isinstance(slots, list) else None)
    context = settings.get("n_ctx")
    fields: dict[str, object] = {
        "max_sequences": count,
        "context_tokens": context,
        "kv_tokens": context * count
        if isinstance(context, int) and isinstance(count, int)
        else None,
        "reserves_context": True,
    }
    return fields, _text(told.get("build_info")), _text(told.get("model_path"))


def _ollama(endpoint: Endpoint) -> _Read:
    version = _object(endpoint.found("/api/version")).get("version")
    loaded = _object(endpoint.found("/api/ps")).get("models")
    models = [each for each in loaded or () if isinstance(each, dict)]
    if not models:
        return {"reserves_context": True}, _text(version), None
    first = models[0]
    size, vram = first.get("size"), first.get("size_vram")
    fields: dict[str, object] = {
        "reserves_context": True,
        "context_tokens": first.get("context_length"),
        "quantization": _object(first.get("details")).get("quantization_level"),
    }
    if isinstance(size, int) and isinstance(vram, int) and size > 0:
        fields |= {"spilled_share": 1 - vram / size, "model_bytes": size, "gpu_bytes": vram}
    return fields, _text(version), _text(first.get("name"))


_READERS = {
    "headrace": _headrace,
    "vllm": _vllm,
    "sglang": _sglang,
    "tgi": _tgi,
    "llama.cpp": _llama_cpp,
    "ollama": _ollama,
}


def _without_metrics(endpoint: Endpoint) -> str:
    """llama.cpp has no metrics unless it is asked to, and Ollama has none at all."""
    if _object(endpoint.found("/api/version")).get("version"):
        return "ollama"
    if "default_generation_settings" in _object(endpoint.found("/props")):
        return "llama.cpp"
    return ""


def _model(models: Any) -> tuple[str | None, int | None]:
    data = _object(models).get("data")
    for each in data or ():
        if isinstance(each, dict) and isinstance(each.get("id"), str):
            longest = each.get("max_model_len")
            return each["id"], longest if isinstance(longest, int) else None
    return None, None


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str | None:
    return None if value in _NOTHING else str(value)


def _number(value: str | None) -> int | None:
    return int(float(value)) if value and value.replace(".", "", 1).isdigit() else None


def _share(value: str | None) -> float | None:
    return float(value) if value and value.replace(".", "", 1).isdigit() else None


def _truth(value: str | None) -> bool | None:
    return {"true": True, "1": True, "false": False, "0": False}.get((value or "").lower())


def told_lines(config: Mapping[str, object]) -> Iterator[str]:
    for name, value in sorted(config.items()):
        yield f"{name}={value}"
