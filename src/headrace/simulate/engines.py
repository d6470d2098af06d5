"""Engines as data: how well each uses a GPU, how its first tokens wait, and how far off that was.

The numbers are in engines.toml, fitted to measured rows by benchmarks/planning/fit_silicon.py (or,
for this engine, to its own figures). A value is the base times the factors of the engine, of the
GPU's generation and of the weights' type; what was never measured has the base alone, and says
so. Knows no model; roofline.py and closed_loop.py use the values.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any

from headrace.core.errors import ConfigError
from headrace.hardware.gpus import Gpu
from headrace.simulate.closed_loop import Waits
from headrace.simulate.roofline import Efficiencies
from headrace.simulate.step_work import Formats

# No engine gets more out of a GPU than this; a fit that says so explains something else by it.
MOST: Mapping[str, float] = {
    "memory": 0.95,
    "expert_memory": 0.95,
    "kv_memory": 0.95,
    "compute": 0.9,
    "expert_compute": 0.9,
    "attention_compute": 0.9,
    "link": 0.95,
    "spread": 1.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Eight of ten measurements were between these multiples of the prediction, for models that
    the coefficients had not seen."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What is known about an engine on a kind of GPU with weights of a type."""

    engine: str
    efficiencies: Efficiencies
    waits: Waits
    step_tokens: int  # of a step, that the coefficients were fitted with
    ttft: Band
    tpot: Band
    unmeasured: tuple[str, ...]  # what no measured row covers: "generation ampere", ...


def engines() -> tuple[str, ...]:
    """Names of the engines that have coefficients of their own."""
    return tuple(_data()["engine"])


def profile(engine: str, gpu: Gpu, formats: Formats) -> Profile:
    """The coefficients of an engine for a GPU and a model's formats. An engine that is not among
    `engines()` is refused; a generation or type without rows falls back to the base."""
    data = _data()
    if engine not in data["engine"]:
        raise ConfigError(
            f"There are no coefficients for an engine called {engine!r}.",
            f"Use one of {', '.join(data['engine'])}.",
            param="engine",
        )
    generation, weights = generation_of(gpu), weights_of(formats)
    own = data["engine"][engine]
    kinds = [own, data["generation"].get(generation, {}), data["weights"].get(weights, {})]
    values = {name: _value(name, base, kinds) for name, base in data["base"].items()}
    unmeasured = [f"generation {generation}"] if generation not in data["generation"] else []
    bands = data["band"][engine]
    return Profile(
        engine=engine,
        efficiencies=Efficiencies(**_of(Efficiencies, values)),
        waits=Waits(**_of(Waits, values)),
        step_tokens=own["step_tokens"],
        ttft=Band(low=bands["ttft"][0], high=bands["ttft"][1]),
        tpot=Band(low=bands["tpot"][0], high=bands["tpot"][1]),
        unmeasured=tuple(unmeasured),
    )


def generation_of(gpu: Gpu) -> str:
    """Of its tensor cores, as far as efficiencies differ by it."""
    major = (gpu.capability or "").partition(".")[0]
    # Desktop and workstation cards of Blackwell have other tensor cores than B200 and its kin.
    by_major = {
        "7": "turing",
        "8": "ampere",
        "9": "hopper",
        "10": "blackwell",
        "12": "blackwell-rtx",
    }
    if gpu.capability == "8.9":
        return "ada"
    if not major and gpu.name.startswith("gh200"):
        return "hopper"
    return by_major.get(major, gpu.vendor.lower())


def weights_of(formats: Formats) -> str:
    """The type that most bytes are kept in: "bf16", "fp8" (8 bits) or "fp4" (4 bits)."""
    value_bytes = min(formats.mlp.value_bytes, formats.experts.value_bytes)
    return "fp4" if value_bytes < 1 else "fp8" if value_bytes < 2 else "bf16"


def _value(name: str, base: float, kinds: Iterable[Mapping[str, float]]) -> float:
    value = base
    for factors in kinds:
        value *= factors.get(name, 1.0)
    return min(value, MOST.get(name, value))


def _of(kind: type[Any], values: Mapping[str, float]) -> dict[str, float]:
    return {field.name: values[field.name] for field in fields(kind)}


@cache
def _data() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("engines.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
