"""What can be chosen about an engine: frozen, checked once, the same words as the flags.

A field made by `flag` is a flag of the command line, with its help text; the others are for
programs. Knows no files and no machine; plan/sizing.py fills in what was left open.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Self, cast

from headrace.core.errors import ConfigError
from headrace.core.sizes import parse_bytes


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
    # A step in which prompts join others' decoding may take so many times as long as one without.
    max_step_growth: float = 2.0
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
            if not low <= value <= high:
                raise ConfigError(
                    f"{name} is {value!r}; expected a number from {low:g} to {high:g}.",
                    f"Set {name} accordingly.",
                    param=name,
                )


class KvDtype(StrEnum):
    """How keys and values are kept. Not every backend has every one."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    INT8 = "int8"
    FP8 = "fp8"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(SchedulerConfig):
    """All of it; as a SchedulerConfig it is what the engine itself reads.

    The KV pool is sized by at most one of kv_memory, kv_tokens and kv_fraction. None of them is as
    kv_fraction=0.5. After checking, `kv_memory` is bytes.
    """

    max_batch_tokens: int = field(default=512, metadata=flag("Most tokens computed in one step."))
    max_sequences: int = field(default=64, metadata=flag("Most sequences computed at one time."))
    block_tokens: int = 16
    context_tokens: int | None = field(
        default=None,
        metadata=flag(
            "Longest prompt and answer together; default: the model's, if memory holds it."
        ),
    )
    kv_dtype: KvDtype = field(default=KvDtype.F16, metadata=flag("How keys and values are kept."))
    kv_memory: int | str | None = field(
        default=None, metadata=flag("Size of the KV pool, as in 4GiB.")
    )
    kv_tokens: int | None = field(default=None, metadata=flag("Size of the KV pool in tokens."))
    kv_fraction: float | None = field(
        default=None,
        metadata=flag(
            "Size of the KV pool: so much of the memory that the weights leave; default: 0.5."
        ),
    )
    threads: int | None = field(
        default=None, metadata=flag("Default: the cores this process may use.")
    )
    overlap: bool = False  # plan a step while the one before it is computed
    load_format: str = "auto"  # "dummy": random weights for a folder of which config.json is read

    def __post_init__(self) -> None:
        for each in fields(self):
            self._check_type(each.name, each.default)
        for name in ("max_batch_tokens", "max_sequences", "block_tokens"):
            self._check_count(name)
        for name in ("context_tokens", "kv_tokens", "threads"):
            if getattr(self, name) is not None:
                self._check_count(name)
        if self.kv_dtype not in tuple(KvDtype):
            raise _refuse("kv_dtype", self.kv_dtype, f"one of {', '.join(KvDtype)}")
        if self.load_format not in ("auto", "dummy"):
            raise _refuse("load_format", self.load_format, "auto or dummy")
        self._check_budget()
        # slots=True makes the class anew, and super() would look for the old one.
        SchedulerConfig.__post_init__(self)
        # One shape for all readers; frozen, so through object's own setter.
        object.__setattr__(self, "kv_dtype", KvDtype(self.kv_dtype))
        object.__setattr__(self, "policy", Policy(self.policy))
        if self.kv_memory is not None:
            object.__setattr__(self, "kv_memory", parse_bytes(self.kv_memory, "kv_memory"))

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> Self:
        """From names and values out of a file or keyword arguments; an unknown name is an error."""
        known = [each.name for each in fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                remedy = f"Did you mean {near[0]}?" if near else f"Choose of {', '.join(known)}."
                raise ConfigError(f"{name!r} is no setting of the engine.", remedy, param=name)
        return cls(**cast("dict[str, Any]", dict(values)))

    @property
    def kv_memory_bytes(self) -> int | None:
        return cast("int | None", self.kv_memory)

    def _check_type(self, name: str, default: object) -> None:
        value = getattr(self, name)
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
            raise _refuse("kv_fraction", fraction, "a number above 0 and at most 1")


def _is_number(value: object) -> bool:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    return good and math.isfinite(cast("float", value))


def _refuse(param: str, found: object, expected: str) -> ConfigError:
    return ConfigError(
        f"{param} is {found!r}; expected {expected}.", f"Set {param} accordingly.", param=param
    )
