"""Everything a server's answers depend on, as one dictionary, and a short hash of it.

Two servers with the same fingerprint give the same answers within the same limits. A large model is
never read whole for it: the hash covers every tensor's name, format, shape and a few of its bytes.
Knows files and configs; no HTTP, and nothing of requests.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from enum import StrEnum
from typing import Any

from headrace.core.config import EngineConfig
from headrace.core.server_config import ServerConfig
from headrace.core.version import headrace_version
from headrace.fetch.catalog import entry_of
from headrace.models.spec import ModelSpec
from headrace.weights.files.gguf import GgufFile
from headrace.weights.load import WeightsFile
from headrace.weights.model_hash import SAMPLED, hash_model

Identity = dict[str, Any]  # JSON values

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("generation_config.json", "config.json"),
)
_TEMPLATE_KEY = "tokenizer.chat_template"

# Addresses, logging, draining, threads and checks change no answer.
NEUTRAL_SETTINGS = frozenset(
    {
        *("host", "port", "api_key", "api_keys_file", "max_connections", "client_timeout_s"),
        *("cors_origin", "allowed_host", "metrics_key", "admin_host", "admin_port", "max_bodies"),
        *("drain_timeout_s", "hang_timeout_s", "max_restarts", "log_format", "log_level"),
        *("max_stored_responses", "max_stored", "response_lifetime_s"),
        *("replicas", "memory_share"),
        *("log_content", "trace", "threads", "debug_invariants", "verify", "prefix_disk"),
        *("role", "handover_host", "handover_port", "handover_tokens", "handover_timeout_s"),
    }
)


def identify(
    file: WeightsFile,
    spec: ModelSpec,
    chat_template: str | None,
    *,
    server: ServerConfig,
    engine: EngineConfig,
) -> Identity:
    """All but the backend's facts, which the engine process reports and `complete` adds."""
    entry = entry_of(file.path)
    return {
        "headrace": headrace_version(),
        "model": {
            "sampled_sha256": hash_model(file, spec),
            "sampled": SAMPLED,
            "bytes": sum(tensor.data.nbytes for tensor in file.stored.values()),
            "catalog_sha256": None if entry is None else entry.sha256,
        },
        "quantization": _formats(file),
        "tokenizer_sha256": _hash_tokenizer(file),
        "chat_template_sha256": None if chat_template is None else _hash(chat_template.encode()),
        "settings": {**_settings(server), **_settings(engine)},
    }


def complete(identity: Identity, backend: Mapping[str, str]) -> Identity:
    """With the facts of the backend that computes (`Backend.facts`)."""
    own = {name: value for name, value in backend.items() if name != "kv_dtype"}
    return {**identity, "kv_dtype": backend["kv_dtype"], "backend": own}


def fingerprint(identity: Identity) -> str:
    """The same file is the same model wherever it is stored: the catalog's name is left out."""
    model = {k: v for k, v in identity["model"].items() if k != "catalog_sha256"}
    counted = json.dumps({**identity, "model": model}, sort_keys=True, separators=(",", ":"))
    return f"hr-{_hash(counted.encode())[:12]}"


def _formats(file: WeightsFile) -> dict[str, float]:
    """Each format's share of the values."""
    values: Counter[str] = Counter()
    for tensor in file.stored.values():
        values[tensor.format.name] += tensor.values
    total = max(values.total(), 1)
    return {name: round(count / total, 4) for name, count in values.most_common()}


def _hash_tokenizer(file: WeightsFile) -> str:
    digest = hashlib.sha256()
    if isinstance(file, GgufFile):
        for key in sorted(k for k in file.metadata if k.startswith("tokenizer.")):
            if key != _TEMPLATE_KEY:
                digest.update(f"{key} {json.dumps(file.metadata[key])}\n".encode())
        return digest.hexdigest()
    for name in TOKENIZER_FILES:
        path = file.path / name
        if path.is_file():
            data = path.read_bytes()
            digest.update(f"{name} {len(data)}\n".encode())
            digest.update(data)
    return digest.hexdigest()


def _settings(config: ServerConfig | EngineConfig) -> dict[str, object]:
    found = {}
    for each in fields(config):
        if each.name not in NEUTRAL_SETTINGS:
            value = getattr(config, each.name)
            found[each.name] = value.value if isinstance(value, StrEnum) else value
    return found


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
