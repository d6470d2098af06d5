"""What can be chosen about an engine: frozen, checked once, the same words as the flags.

A field made by `flag` is a flag of the command line, with its help text; the others are for
programs. Knows no files and no machine; plan/sizing.py fills in what was left open.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Self, cast

from headrace.core.errors import ConfigError, remedy_for
from headrace.core.sizes import parse_bytes, parse_share


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
    watermark: float = 0.02
    # SHORTEST: a second of waiting counts as so many prompt tokens less.
    ageing_tokens_per_s: float = 200.0
    max_step_growth: float | None = field(
        default=None,
        metadata=flag(
            "A step in which prompts join others' decoding may take so many times as long as one "
            "without; default: 2, on a GPU 24."
        ),
    )
    debug_invariants: bool = field(
        default=False, metadata=flag("Check the pool's integrity after every step.")
    )

    def __post_init__(self) -> None:
        if self.policy not in tuple(Policy):
            raise ConfigError(
                f"policy is {self.policy!r}; expected one of {', '.join(Policy)}.",
                "Choose one.",
                param="policy",
            )
        for name, low, high in (
            ("watermark", 0.0, 0.5),
            ("ageing_tokens_per_s", 0.001, 1e9),
            ("max_step_growth", 1.0, 1e9),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(
                    f"{name} is {value!r}; expected {low:g} to {high:g}.",
                    f"Use {name} {low:g} to {high:g}.",
                    param=name,
                )


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
        metadata=flag("Most tokens computed in one step; default: 512, on a GPU 8192."),
    )
    max_sequences: int | None = field(
        default=None,
        metadata=flag("Most sequences computed at one time; default: 64, on a GPU 512."),
    )
    block_tokens: int | None = None
    context_tokens: int | None = field(
        default=None,
        metadata=flag(
            "Longest prompt and answer together; default: the model's, if memory holds it."
        ),
    )
    kv_dtype: KvDtype | None = field(
        default=None, metadata=flag("How keys and values are kept; default: f16, on a GPU bf16.")
    )
    kv_memory: int | str | None = field(
        default=None, metadata=flag("Size of the KV pool, as in 4GiB.")
    )
    kv_tokens: int | None = field(default=None, metadata=flag("Size of the KV pool in tokens."))
    kv_fraction: float | None = field(
        default=None,
        metadata=flag(
            "Size of the KV pool: so much of the memory that the weights leave; default: 0.5, on a "
            "GPU 1."
        ),
    )
    threads: int | None = field(
        default=None, metadata=flag("Default: the cores this process may use.")
    )
    gpu_memory: float | str = field(
        default="0.9", metadata=flag("Most memory of the GPU to take: a fraction, or as in 60GiB.")
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
        for each in fields(self):
            self._check_type(each.name, each.default)
        for name in (*_COUNTS, "context_tokens", "kv_tokens", "threads"):
            if getattr(self, name) is not None:
                self._check_count(name)
        if self.overlap is not None and not isinstance(self.overlap, bool):
            raise _refuse("overlap", self.overlap, "True or False")
        parse_share(self.gpu_memory, "gpu_memory")
        self._check_budget()
        # slots=True makes the class anew, and super() would look for the old one.
        SchedulerConfig.__post_init__(self)
        # One shape for all readers; frozen, so through object's own setter.
        for name, kind in _CHOICES.items():
            if (value := getattr(self, name)) is not None:
                if value not in tuple(kind):
                    raise _refuse(name, value, f"one of {', '.join(kind)}")
                object.__setattr__(self, name, kind(value))
        object.__setattr__(self, "policy", Policy(self.policy))
        if self.kv_memory is not None:
            object.__setattr__(self, "kv_memory", parse_bytes(self.kv_memory, "kv_memory"))

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

    def _check_type(self, name: str, default: object) -> None:
        value = getattr(self, name)
        if name == "max_step_growth" and value is not None and not _is_number(value):
            raise _refuse(name, value, "a number")
        if isinstance(default, bool) and not isinstance(value, bool):
            raise _refuse(name, value, "True or False")
        if isinstance(default, float) and not _is_number(value):
            raise _refuse(name, value, "a number")

    def _check_count(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise _refuse(name, value, "1 or more")

    def _check_budget(self) -> None:
        budgets = ("kv_memory", "kv_tokens", "kv_fraction")
        given = [name for name in budgets if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(
                f"{' and '.join(given)} are given; expected at most one of kv_memory, kv_tokens "
                "and kv_fraction: each says how large the KV pool is.",
                "Keep one of them.",
                param=given[1],
            )
        fraction = self.kv_fraction
        if fraction is not None and not (_is_number(fraction) and 0 < fraction <= 1):
            raise _refuse("kv_fraction", fraction, "above 0 and at most 1")


_COUNTS = ("max_batch_tokens", "max_sequences", "block_tokens")
_CHOICES: dict[str, type[StrEnum]] = {
    "device": Device,
    "kv_dtype": KvDtype,
    "quantization": Quantization,
    "load_format": LoadFormat,
    "generation_config": GenerationConfig,
    "graphs": GraphMode,
}


# Settings of earlier versions, and what they are called now.
RENAMED = {"backend": "device"}


def renamed(old: str, value: object, write: Callable[[str, object], str]) -> ConfigError:
    """For whoever uses an old name; `write` is how a name and its value are written there."""
    new, choices = RENAMED[old], tuple(_CHOICES[RENAMED[old]])
    if value in choices:
        cause = f"{write(old, value)!r} is now {write(new, value)!r}."
        return ConfigError(cause, "Use the new name.", param=old)
    return ConfigError(
        f"{write(old, value)!r}: this setting is now {new!r}, one of {', '.join(choices)}.",
        f"Write {write(new, choices[0])!r}, for example.",
        param=old,
    )


def _is_number(value: object) -> bool:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    return good and math.isfinite(cast("float", value))


def _refuse(param: str, found: object, expected: str) -> ConfigError:
    return ConfigError(
        f"{param} is {found!r}; expected {expected}.", remedy_for(param, expected), param=param
    )
