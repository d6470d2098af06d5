"""How a model likes to be sampled, from the first that says so: one rule for library, CLI, server.

    generation_config.json in the model's folder, or the GGUF's own header (general.sampling.*)
    the catalog
    nobody: temperature 1 over all tokens

What a caller gives comes before all of them, each number by itself. Knows files and the catalog;
no request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from headrace.core.config import GenerationConfig
from headrace.core.errors import HeadraceError, WeightsError
from headrace.core.habits import NEUTRAL, Habits
from headrace.fetch.catalog import entry_of
from headrace.weights.files.gguf import GgufFile
from headrace.weights.files.json_file import read_object
from headrace.weights.load import OpenFile

FILE_NAME = "generation_config.json"
_NAMES = ("temperature", "top_p", "top_k", "repetition_penalty")
# As llama.cpp writes them into the header when it converts a model.
_GGUF_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_WITHOUT = "Correct it, or leave the file's advice out: --generation-config none."


def read_habits(path: Path, file: OpenFile, wanted: GenerationConfig) -> Habits:
    """`path` is what MODEL was resolved to: a folder may have a file of advice beside its GGUF."""
    if wanted is GenerationConfig.NONE:
        return NEUTRAL
    advice = path / FILE_NAME
    if path.is_dir() and advice.is_file():
        return _habits(read_object(advice), str(advice))
    if isinstance(file, GgufFile):
        found = {n: file.metadata[k] for k, n in _GGUF_KEYS.items() if k in file.metadata}
        if found:
            return _habits(found, f"{file.path}: general.sampling")
    entry = entry_of(path)
    return NEUTRAL if entry is None else entry.habits


def _habits(values: Mapping[str, object], where: str) -> Habits:
    """`do_sample` false is greedy, whatever stands beside it; null is as not being there."""
    given = {name: _number(values[name], name, where) for name in _NAMES if _has(values, name)}
    if values.get("do_sample") is False:
        given["temperature"] = 0.0
    top_k = max(int(given.pop("top_k", 0)), 0)  # -1 is "all" too
    try:
        return Habits(top_k=top_k, **given)
    except HeadraceError as error:
        raise WeightsError(f"{where}: {error.cause}", _WITHOUT) from error


def _has(values: Mapping[str, object], name: str) -> bool:
    return values.get(name) is not None


def _number(value: object, name: str, where: str) -> float:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not math.isfinite(float(value)):  # type: ignore[arg-type]
        raise WeightsError(f"{where}: {name} is {str(value)[:80]!r}; expected a number.", _WITHOUT)
    return float(value)  # type: ignore[arg-type]
