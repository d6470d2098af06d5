"""A model's default sampling values, from the first of these sources that has any:

    generation_config.json in the model's folder, or the GGUF's own header (general.sampling.*)
    the catalog
    neutral values: temperature 1 over all tokens

A parameter in a request overrides its default. core/sampling.py says which parameters may have a
default in a model's files, and their keys in a GGUF. Knows files and the catalog; no request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.core.checks import check_fields
from headrace.core.config import GenerationConfig
from headrace.core.errors import HeadraceError, WeightsError
from headrace.core.sampling import MODEL_DEFAULTS, NEUTRAL, DrawFields, DrawNumbers, rows_of
from headrace.fetch.catalog import entry_of
from headrace.weights.files.gguf import GgufFile
from headrace.weights.files.json_file import read_object
from headrace.weights.load import OpenFile

FILE_NAME = "generation_config.json"
# The keys that llama.cpp's converter writes into the header.
_GGUF_KEYS = {each.gguf_key: name for name, each in rows_of(DrawFields) if each.gguf_key}
_WITHOUT = "Correct it, or ignore the model's defaults with --generation-config none."


def read_sampling_defaults(path: Path, file: OpenFile, wanted: GenerationConfig) -> DrawNumbers:
    """`path` is what MODEL was resolved to: a folder may have a generation_config.json beside its
    GGUF."""
    if wanted is GenerationConfig.NONE:
        return NEUTRAL
    advice = path / FILE_NAME
    if path.is_dir() and advice.is_file():
        return _defaults(read_object(advice), str(advice))
    if isinstance(file, GgufFile):
        found = {n: file.metadata[k] for k, n in _GGUF_KEYS.items() if k in file.metadata}
        if found:
            return _defaults(found, f"{file.path}: general.sampling")
    entry = entry_of(path)
    return NEUTRAL if entry is None else entry.sampling_defaults


def _defaults(values: Mapping[str, object], where: str) -> DrawNumbers:
    """`do_sample` false means greedy, whatever the other values are; null means absent."""
    names = [name for name in MODEL_DEFAULTS if values.get(name) is not None]
    given: dict[str, Any] = {name: _number(values[name], name, where) for name in names}
    if values.get("do_sample") is False:
        given["temperature"] = 0.0
    if "top_k" in given:
        given["top_k"] = max(int(given["top_k"]), 0)  # -1 is "all" too
    found = DrawNumbers(**given)
    try:
        check_fields(found)
    except HeadraceError as error:
        raise WeightsError(f"{where}: {error.cause}", _WITHOUT) from error
    return found


def _number(value: object, name: str, where: str) -> float:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not math.isfinite(float(value)):  # type: ignore[arg-type]
        raise WeightsError(f"{where}: {name} is {str(value)[:80]!r}; expected a number.", _WITHOUT)
    return float(value)  # type: ignore[arg-type]
