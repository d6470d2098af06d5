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
from headrace.core.drafter import MOST_DRAFT_TOKENS, DrafterText
from headrace.core.errors import ConfigError
from headrace.core.prefix_disk import PrefixDiskText
from headrace.core.sizes import Share, Size


def flag(help: str) -> dict[str, str]:
    """Metadata of a field that is also a command line flag. The flag of a setting that is on by
    default is `--no-...`, and `help` describes that flag."""
    return {"help": help}


class Policy(StrEnum):
    """In which order waiting requests are admitted."""

    FCFS = "fcfs"  # in order of arrival
    PRIORITY = "priority"  # lowest `priority` first, then in order of arrival
    SHORTEST = "shortest"  # shortest prompt first, with ageing so that no request starves


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    policy: Policy = field(default=Policy.FCFS, metadata=flag("Which waiting request goes first."))
    prefix_cache: bool = field(
        default=True,
        metadata=flag("Turn the prefix cache off: compute every prompt in full."),
    )
    # The fraction of the pool that admission leaves free, so that running sequences can grow.
    watermark: float = field(default=0.02, metadata=within(at_least=0, at_most=0.5))
    # For each block of the pool, how many evicted ones are remembered, to report why a prefix was
    # not found. A fleet of simulated engines needs the memory more than the reason.
    remembered_evictions: int = field(default=4, metadata=within(at_least=0, at_most=1000))
    # SHORTEST: one second of waiting counts as this many prompt tokens less.
    ageing_tokens_per_s: float = field(
        default=200.0, metadata=within(at_least=0.001, at_most=10**9)
    )
    max_step_growth: float | None = field(
        default=None,
        metadata=flag(
            "How many times as long as a decode-only step a step may take when prompts are "
            "computed in it too; default: 2, on a GPU 24."
        )
        | within(at_least=1, at_most=10**9),
    )
    speculate: str | None = field(
        default=None,
        metadata=flag(
            "Guess tokens and check several in one step: auto, ngram, suffix, draft:MODEL or off; "
            "default: auto, on a GPU off. On a CPU answers stay the same; on a GPU they vary as in "
            "any other batch."
        )
        | {RULE: DrafterText()},
    )
    max_draft_tokens: int = field(
        default=16,
        metadata=flag("Most tokens guessed for a sequence in one step.")
        | within(at_least=1, at_most=MOST_DRAFT_TOKENS),
    )
    debug_invariants: bool = field(
        default=False, metadata=flag("Check the pool's integrity after every step.")
    )

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)


class KvDtype(StrEnum):
    """The type of keys and values in the KV pool. Not every backend supports every type."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    INT8 = "int8"
    FP8 = "fp8"


class Device(StrEnum):
    """What computes; each except `auto` is the name of a backend."""

    AUTO = "auto"  # a supported GPU if there is one, else the CPU
    CPU = "cpu"
    CUDA = "cuda"
    REFERENCE = "reference"  # numpy in float32: slow, and what the others are tested against


class Quantization(StrEnum):
    """How a model's layers are quantized while they are loaded onto a GPU."""

    NONE = "none"  # as they are
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"


class LoadFormat(StrEnum):
    AUTO = "auto"  # what is in the file
    DUMMY = "dummy"  # random weights, for benchmarks: only a config.json is needed


class GenerationConfig(StrEnum):
    """Where the default temperature, top_p, top_k and repetition_penalty come from."""

    AUTO = "auto"  # the model's own: generation_config.json, its GGUF header, the catalog
    NONE = "none"  # neutral values: temperature 1 over all tokens


class GraphMode(StrEnum):
    """When CUDA graphs are captured: with one, a step costs the host a single call."""

    START = "start"  # common shapes at start, others on first use
    LAZY = "lazy"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """The sizes, and other settings of a step, for which each backend has its own defaults."""

    max_batch_tokens: int
    max_sequences: int
    block_tokens: int
    kv_dtype: KvDtype
    overlap: bool
    max_step_growth: float
    speculate: str = "off"  # as --speculate has it; `auto` where it was measured to pay


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(SchedulerConfig):
    """All engine settings. The scheduler reads only the part that is in SchedulerConfig.

    The KV pool is sized by at most one of kv_memory, kv_tokens and kv_fraction; if none is given,
    by kv_fraction=0.5, on a GPU 1. After checking, `kv_memory` is in bytes. The backend chooses
    values that are None.
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
            "Size of the KV pool as a fraction of the memory that the weights leave; default: 0.5, "
            "on a GPU 1."
        )
        | within(above=0, at_most=1),
    )
    prefix_disk: str | None = field(
        default=None,
        metadata=flag(
            "Keep the prefix cache on disk too, so that it survives a restart: a folder and the "
            "most it may take, as in /var/cache/headrace,20GiB."
        )
        | {RULE: PrefixDiskText()},
    )
    threads: int | None = field(
        default=None,
        metadata=flag("CPU threads; default: the cores this process may use.") | within(at_least=1),
    )
    gpu_memory: float | str = field(
        default="0.9",
        metadata=flag("Most memory of the GPU to take: a fraction, or as in 60GiB.")
        | {RULE: Share()},
    )
    tensor_parallel: int = field(
        default=1,
        metadata=flag("Processes, each with its GPU, that compute the model together.")
        | within(at_least=1, at_most=64),
    )
    pipeline_parallel: int = field(
        default=1,
        metadata=flag("Stages that have some of the layers each, of --tensor-parallel processes.")
        | within(at_least=1, at_most=64),
    )
    quantization: Quantization = field(
        default=Quantization.NONE, metadata=flag("Quantize layers while loading them onto a GPU.")
    )
    load_format: LoadFormat = field(
        default=LoadFormat.AUTO,
        metadata=flag("Where weights come from; dummy: random ones, only config.json is needed."),
    )
    generation_config: GenerationConfig = field(
        default=GenerationConfig.AUTO,
        metadata=flag(
            "Default temperature, top_p, top_k and repetition_penalty: the model's own (auto), or "
            "neutral values (none: temperature 1 over all tokens)."
        ),
    )
    graphs: GraphMode = field(
        default=GraphMode.START, metadata=flag("When CUDA graphs are captured on a GPU.")
    )
    batch_invariant: bool = field(
        default=False,
        metadata=flag(
            "On a GPU: an answer has the same bits whatever else is in its batch. Slower. Always "
            "true on a CPU."
        ),
    )
    verify: bool = field(
        default=False,
        metadata=flag(
            "Hash the model's files before loading them, even if they have not changed since they "
            "were last hashed."
        ),
    )
    # Most bytes of this machine's memory to plan with: what other engines leave to this one.
    memory_share: int | None = field(default=None, metadata=within(at_least=1))
    overlap: bool | None = None  # plan a step while the one before it is computed

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        given = [name for name in _POOL_SIZES if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(
                f"{' and '.join(given)} are given; expected at most one of kv_memory, kv_tokens "
                "and kv_fraction: each sets the size of the KV pool.",
                "Keep one of them.",
                param=given[1],
            )

        if self.prefix_disk is not None and (not self.prefix_cache or self.tensor_parallel > 1):
            why = "a prefix cache; it is turned off" if not self.prefix_cache else "one process"
            raise ConfigError(
                f"prefix_disk needs an engine with {why}.",
                "Leave out prefix_disk, or the setting that it does not go with: prefix_cache, "
                "tensor_parallel.",
                param="prefix_disk",
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> Self:
        """From names and values as keyword arguments. Other engines' names are understood, or their
        errors say what to do (core/foreign/); an unknown name is an error."""
        known = [each.name for each in fields(cls)]
        for name in values:
            if name in RENAMED:
                raise renamed(name, values[name], "{}={!r}".format)
        values = _own_names(values, known)
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                remedy = (
                    f"Did you mean {near[0]}?" if near else f"Choose one of {', '.join(known)}."
                )
                raise ConfigError(f"Unknown engine setting {name!r}.", remedy, param=name)
        return cls(**cast("dict[str, Any]", dict(values)))

    def sizes(self, defaults: StepSizes) -> StepSizes:
        """The sizes that are set, with a backend's defaults for the others."""
        given = {each.name: getattr(self, each.name) for each in fields(StepSizes)}
        return replace(defaults, **{name: v for name, v in given.items() if v is not None})

    @property
    def ranks(self) -> int:
        """Processes that compute the model together."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def kv_memory_bytes(self) -> int | None:
        return cast("int | None", self.kv_memory)


_POOL_SIZES = ("kv_memory", "kv_tokens", "kv_fraction")


def _own_names(values: Mapping[str, object], known: list[str]) -> dict[str, object]:
    """The values with other engines' names and words replaced by ours."""
    if all(name in known for name in values) and not SHARED_NAMES & values.keys():
        return dict(values)
    from headrace.core.foreign.keywords import own_keywords

    return own_keywords(values, known)


# Settings that other engines have under the same name, with values of their own.
SHARED_NAMES = frozenset({"quantization", "load_format", "generation_config", "policy"})

# Settings of earlier versions, and what they are called now.
RENAMED = {"backend": "device"}


def renamed(old: str, value: object, write: Callable[[str, object], str]) -> ConfigError:
    """The error for an old name. `write` formats a name and a value as the user wrote them: as a
    flag, a variable or a line of the file."""
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
