"""What can be chosen about an engine: frozen, checked once, the same words as the flags.

A field made by `flag` is a flag of the command line, with its help text; the others are for
programs. Knows no files and no machine; plan/sizing.py fills in what was left open.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Self, cast

from headrace.core.checks import RULE, Choice, check_fields, rule_of, within
from headrace.core.errors import ConfigError
from headrace.core.sizes import Share, Size


def flag(help: str) -> dict[str, str]:
    """Metadata of a field that is a flag of the command line too. What is on by default is turned
    off by its flag, `--no-...`: the help is that flag's."""
    return {"help": help}


class Policy(StrEnum):
    """In which order waiting requests are admitted."""

    FCFS = "fcfs"  # as they came
    PRIORITY = "priority"  # lowest `priority` first, then as they came
    SHORTEST = "shortest"  # shortest prompt first, with ageing so that nobody starves


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    policy: Policy = field(default=Policy.FCFS, metadata=flag("Which waiting request goes first."))
    prefix_cache: bool = field(
        default=True,
        metadata=flag("Compute every prompt whole, also where its beginning is known."),
    )
    # Of the pool: what admission leaves free, so that running sequences can grow.
    watermark: float = field(default=0.02, metadata=within(at_least=0, at_most=0.5))
    # SHORTEST: a second of waiting counts as so many prompt tokens less.
    ageing_tokens_per_s: float = field(
        default=200.0, metadata=within(at_least=0.001, at_most=10**9)
    )
    max_step_growth: float | None = field(
        default=None,
        metadata=flag(
            "A step in which prompts join others' decoding may take so many times as long as one "
            "without; default: 2, on a GPU 24."
        )
        | within(at_least=1, at_most=10**9),
    )
    debug_invariants: bool = field(
        default=False, metadata=flag("Check the pool's integrity after every step.")
    )

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)


class KvDtype(StrEnum):
    """How keys and values are kept. Not every backend has every one."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    INT8 = "int8"
    FP8 = "fp8"


class Device(StrEnum):
    """What computes; each but `auto` is a backend's name."""

    AUTO = "auto"  # a supported GPU if there is one, else the CPU
    CPU = "cpu"
    CUDA = "cuda"
    REFERENCE = "reference"  # numpy in float32: slow, and what the others are tested against


class Quantization(StrEnum):
    """What a model's layers become while they are loaded onto a GPU."""

    NONE = "none"  # as they are
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"


class LoadFormat(StrEnum):
    AUTO = "auto"  # what is in the file
    DUMMY = "dummy"  # random weights, for which a config.json is enough: to measure with


class GenerationConfig(StrEnum):
    """Whose temperature, top_p, top_k and repetition_penalty hold where a request names none."""

    AUTO = "auto"  # the model's own: generation_config.json, its GGUF header, the catalog
    NONE = "none"  # nobody's: temperature 1 over all tokens


class GraphMode(StrEnum):
    """When a GPU's launches are captured, so that a step costs the host one call."""

    START = "start"  # common shapes at start, others when they come
    LAZY = "lazy"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """What each backend has its own defaults for."""

    max_batch_tokens: int
    max_sequences: int
    block_tokens: int
    kv_dtype: KvDtype
    overlap: bool
    max_step_growth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(SchedulerConfig):
    """All of it; as a SchedulerConfig it is what the engine itself reads.

    The KV pool is sized by at most one of kv_memory, kv_tokens and kv_fraction. None of them is as
    kv_fraction=0.5, on a GPU 1. After checking, `kv_memory` is bytes. What is None is chosen by the
    backend.
    """

    device: Device = field(
        default=Device.AUTO,
        metadata=flag(
            "What computes; auto: a supported GPU, else the CPU; reference: slow and exact."
        ),
    )
    max_batch_tokens: int | None = field(
        default=None,
        metadata=flag("Most tokens computed in one step; default: 512, on a GPU 8192.")
        | within(at_least=1),
    )
    max_sequences: int | None = field(
        default=None,
        metadata=flag("Most sequences computed at one time; default: 64, on a GPU 512.")
        | within(at_least=1),
    )
    block_tokens: int | None = field(default=None, metadata=within(at_least=1))
    context_tokens: int | None = field(
        default=None,
        metadata=flag(
            "Longest prompt and answer together; default: the model's, if memory holds it."
        )
        | within(at_least=1),
    )
    kv_dtype: KvDtype | None = field(
        default=None, metadata=flag("How keys and values are kept; default: f16, on a GPU bf16.")
    )
    kv_memory: int | str | None = field(
        default=None, metadata=flag("Size of the KV pool, as in 4GiB.") | {RULE: Size()}
    )
    kv_tokens: int | None = field(
        default=None, metadata=flag("Size of the KV pool in tokens.") | within(at_least=1)
    )
    kv_fraction: float | None = field(
        default=None,
        metadata=flag(
            "Size of the KV pool: so much of the memory that the weights leave; default: 0.5, on a "
            "GPU 1."
        )
        | within(above=0, at_most=1),
    )
    threads: int | None = field(
        default=None,
        metadata=flag("Default: the cores this process may use.") | within(at_least=1),
    )
    gpu_memory: float | str = field(
        default="0.9",
        metadata=flag("Most memory of the GPU to take: a fraction, or as in 60GiB.")
        | {RULE: Share()},
    )
    quantization: Quantization = field(
        default=Quantization.NONE, metadata=flag("Quantize layers while loading them onto a GPU.")
    )
    load_format: LoadFormat = field(
        default=LoadFormat.AUTO,
        metadata=flag("Of weights; dummy: random ones, a config.json is enough."),
    )
    generation_config: GenerationConfig = field(
        default=GenerationConfig.AUTO,
        metadata=flag(
            "Temperature, top_p, top_k and repetition_penalty where a request names none: the "
            "model's own, or none (temperature 1 over all tokens)."
        ),
    )
    graphs: GraphMode = field(
        default=GraphMode.START, metadata=flag("When a GPU's launches are captured into graphs.")
    )
    batch_invariant: bool = field(
        default=False,
        metadata=flag(
            "On a GPU: an answer has the same bits whatever runs beside it. Slower. On a CPU it is "
            "always so."
        ),
    )
    verify: bool = field(
        default=False,
        metadata=flag(
            "Hash the model's files before loading them, also where they have not changed since "
            "they last were."
        ),
    )
    overlap: bool | None = None  # plan a step while the one before it is computed

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        given = [name for name in _POOL_SIZES if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(
                f"{' and '.join(given)} are given; expected at most one of kv_memory, kv_tokens "
                "and kv_fraction: each says how large the KV pool is.",
                "Keep one of them.",
                param=given[1],
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> Self:
        """From names and values out of a file or keyword arguments; an unknown name is an error."""
        known = [each.name for each in fields(cls)]
        for name in values:
            if name in RENAMED:
                raise renamed(name, values[name], "{}={!r}".format)
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                remedy = (
                    f"Did you mean {near[0]}?" if near else f"Choose one of {', '.join(known)}."
                )
                raise ConfigError(f"Unknown engine setting {name!r}.", remedy, param=name)
        return cls(**cast("dict[str, Any]", dict(values)))

    def sizes(self, defaults: StepSizes) -> StepSizes:
        """What was asked for, and a backend's defaults for the rest."""
        given = {each.name: getattr(self, each.name) for each in fields(StepSizes)}
        return replace(defaults, **{name: v for name, v in given.items() if v is not None})

    @property
    def kv_memory_bytes(self) -> int | None:
        return cast("int | None", self.kv_memory)


_POOL_SIZES = ("kv_memory", "kv_tokens", "kv_fraction")

# Settings of earlier versions, and what they are called now.
RENAMED = {"backend": "device"}


def renamed(old: str, value: object, write: Callable[[str, object], str]) -> ConfigError:
    """For whoever uses an old name; `write` is how a name and its value are written there."""
    new = RENAMED[old]
    rule = rule_of(EngineConfig, new)[1]
    assert isinstance(rule, Choice)
    choices = tuple(rule.words)
    if value in choices:
        cause = f"{write(old, value)!r} is now {write(new, value)!r}."
        return ConfigError(cause, "Use the new name.", param=old)
    return ConfigError(
        f"{write(old, value)!r}: this setting is now {new!r}, one of {', '.join(choices)}.",
        f"Write {write(new, choices[0])!r}, for example.",
        param=old,
    )
