"""A benchmark's result file: the rate of a server under load, and the lengths it was asked with.

Reads what `vllm bench serve --save-result` writes (and tools that write the same keys). Judges only
whether it was a load at all: one request at a time is refused by search/cost.py's error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError
from headrace.search.cost import Mix, refuse_stream

_NEEDED = ("output_throughput", "total_input_tokens", "total_output_tokens", "completed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """`output_tokens_s` counts requests within the objective only, where the file knows them."""

    output_tokens_s: float
    mix: Mix
    model: str | None
    notes: tuple[str, ...]


def read_measured(path: Path, usd_per_hour: float | None = None) -> Measured:
    """`usd_per_hour` of the whole replica, for the message to one who measured a single stream."""
    found = _read(path)
    numbers = {key: _number(found, key, path) for key in _NEEDED}
    completed, rate = numbers["completed"], numbers["output_throughput"]
    at_once = [found.get("max_concurrency"), found.get("max_concurrent_requests")]
    if 1 in at_once or completed == 1:
        raise refuse_stream(rate, usd_per_hour)
    notes = [f"{completed:,.0f} requests, {rate:,.0f} output tokens/s, from {path.name}"]
    if failed := found.get("failed"):
        notes.append(f"{failed} requests failed and are not counted")
    good, all_of = found.get("request_goodput", 0), found.get("request_throughput", 0)
    if _is_positive(good) and _is_positive(all_of) and float(good) < float(all_of):
        share = float(good) / float(all_of)
        rate *= share
        notes.append(f"{share:.1%} of the requests were within the objective; the rate is theirs")
    return Measured(
        output_tokens_s=rate,
        mix=Mix(
            input_tokens=numbers["total_input_tokens"] / completed,
            output_tokens=numbers["total_output_tokens"] / completed,
        ),
        model=found["model_id"] if isinstance(found.get("model_id"), str) else None,
        notes=tuple(notes),
    )


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} can't be read: {error.strerror}.",
            "Give the file that `vllm bench serve --save-result` wrote.",
            param="measured",
        ) from None
    except ValueError as error:  # not JSON, or not UTF-8
        raise ConfigError(
            f"{path} is not JSON: {error}.",
            "Give the file that `vllm bench serve --save-result` wrote.",
            param="measured",
        ) from None
    if not isinstance(found, dict):
        raise _lacks(path, _NEEDED)
    if missing := [key for key in _NEEDED if key not in found]:
        raise _lacks(path, missing)
    return found


def _number(found: Mapping[str, Any], key: str, path: Path) -> float:
    value = found[key]
    if not _is_positive(value) and not (key == "total_input_tokens" and value == 0):
        raise ConfigError(
            f"{path}: {key} is {value!r}; expected a number above 0.",
            "A run without answers says nothing about cost: measure again.",
            param="measured",
        )
    return float(value)


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0


def _lacks(path: Path, keys: Any) -> ConfigError:
    return ConfigError(
        f"{path} lacks {', '.join(keys)}; expected the result of a benchmark.",
        "Give the file that `vllm bench serve --save-result` wrote.",
        param="measured",
    )
