"""Facts about this installation, this machine and a model, as one plain dictionary.

Reads headers only: no weight is loaded and nothing is fetched. commands.py
prints them.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headrace.core.config import Device, EngineConfig, GenerationConfig, LoadFormat
from headrace.core.sampling import model_defaults
from headrace.core.version import headrace_version
from headrace.fetch.catalog import CatalogEntry
from headrace.fetch.model_folder import cache_folder
from headrace.models.spec import ModelSpec
from headrace.plan.ledger import Ledger
from headrace.weights.tensor import Tensor

Facts = dict[str, Any]  # JSON values

KV_VALUE_BYTES = 2  # the CPU backend keeps keys and values as F16


def machine_facts() -> Facts:
    """What the CPU backend found: cpu, features, path, threads and why, memory."""
    from headrace.backends.cpu import machine

    return dict(machine.describe())


def gpu_facts() -> Facts:
    """What the CUDA backend found; without a driver only that fact, without importing anything."""
    from headrace.backends.cuda import device

    return dict(device.describe())


def installation_facts() -> Facts:
    return {
        "version": headrace_version(),
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "cache_folder": str(cache_folder()),
    }


def model_facts(path: Path, load_format: LoadFormat = LoadFormat.AUTO) -> Facts:
    """`verified`: the file was hashed since it last changed and the hash is right; None: no hash is
    published for it."""
    from headrace.fetch.verify import is_verified
    from headrace.weights.describe import describe_file
    from headrace.weights.load import open_weights

    file = open_weights(path, load_format)
    try:
        spec, _ = describe_file(file)
        stored = (
            tensor_facts(file.stored.values()) if file.stored else {}
        )  # dummy weights: nothing is stored
        known = {"path": str(path), "verified": is_verified(path)}
        return {**known, **spec_facts(spec), **stored}
    finally:
        file.close()


def catalog_facts(entry: CatalogEntry) -> Facts:
    return {
        "name": entry.name,
        "aliases": list(entry.aliases),
        "title": entry.title,
        "licence": entry.licence,
        "terms": None if entry.terms is None else entry.terms.address,
        "quantization": entry.quantization,
        "context_tokens": entry.context_tokens,
        "size_bytes": entry.size_bytes,
        "sha256": entry.sha256,
        "fetched_from": entry.hub_file or "the package index",
        "remark": entry.remark or None,
    }


def habit_facts(model: Path | CatalogEntry) -> Facts:
    """The model's default sampling values."""
    from headrace.weights.load import open_weights
    from headrace.weights.sampling_defaults import read_sampling_defaults

    if isinstance(model, CatalogEntry):
        return model_defaults(model.sampling_defaults)
    file = open_weights(model)
    try:
        return model_defaults(read_sampling_defaults(model, file, GenerationConfig.AUTO))
    finally:
        file.close()


def memory_ledger(path: Path) -> Ledger:
    """The memory that serving this model on the CPU would need with default settings."""
    from headrace.assemble import plan_memory
    from headrace.backends.registry import choose_backend
    from headrace.weights.load import open_weights

    config = EngineConfig(device=Device.CPU)
    file = open_weights(path)
    try:
        return plan_memory(file, choose_backend(config), config)[2].ledger
    finally:
        file.close()


def spec_facts(spec: ModelSpec) -> Facts:
    first = spec.attention[0]
    windows = {a.window for a in spec.attention if a.window is not None}
    return {
        "family": spec.family,
        "parameters": spec.parameters,
        "layers": spec.layers,
        "hidden_size": spec.hidden_size,
        "heads": first.heads,
        "kv_heads": first.kv_heads,
        "head_dim": first.head_dim,
        "window": min(windows) if windows else None,
        "vocab_size": spec.vocab_size,
        "context_tokens": spec.context_tokens,
        "kv_bytes_per_token": spec.kv_bytes_per_token(KV_VALUE_BYTES),
    }


def tensor_facts(tensors: Iterable[Tensor]) -> Facts:
    """Bytes in all, and each format's share of the values."""
    values: Counter[str] = Counter()
    weight_bytes = 0
    for tensor in tensors:
        values[tensor.format.name] += tensor.values
        weight_bytes += tensor.data.nbytes
    total = max(values.total(), 1)
    return {
        "weight_bytes": weight_bytes,
        "quantization": {name: count / total for name, count in values.most_common()},
    }


def shown_lines(facts: Facts) -> list[str]:
    """Sections of name and value, for a person."""
    lines = []
    for section, entries in facts.items():
        lines.append(section)
        for name, value in entries.items():
            label = name.removesuffix("_bytes").replace("_", " ")  # the value says its unit
            lines.append(f"  {label:<24}{_shown(name, value)}".rstrip())
    return lines


def shown_verified(value: bool | None) -> str:
    return "unknown" if value is None else "yes" if value else "at the next load"


def _shown(name: str, value: Any) -> str:
    if name == "verified":
        return shown_verified(value)
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "quantization" and isinstance(value, dict):
        return ", ".join(f"{kind} {share:.1%}" for kind, share in value.items())
    if name.endswith("_bytes_per_token"):
        return f"{value:,} (at {8 * KV_VALUE_BYTES} bits per value)"
    if name.endswith("_bytes"):
        return f"{value / 1e6:,.1f} MB"
    if name == "parameters":
        return f"{value / 1e6:,.1f} M"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return str(value)
