"""What can be chosen about an engine: frozen, checked once, the same words as the flags.

Knows no files and no machine; assemble.py fills in what was left open.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from headrace.core.errors import ConfigError


class Policy(StrEnum):
    """In which order waiting requests are admitted."""

    FCFS = "fcfs"  # as they came
    PRIORITY = "priority"  # lowest `priority` first, then as they came
    SHORTEST = "shortest"  # shortest prompt first, with ageing so that nobody starves


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    policy: Policy = Policy.FCFS
    prefix_cache: bool = True
    # Of the pool: what admission leaves free, so that running sequences can grow without preempting.
    watermark: float = 0.02
    # SHORTEST: a second of waiting counts as so many prompt tokens less.
    ageing_tokens_per_s: float = 200.0
    # Of a step's tokens: the most that prompts may take while others are decoding.
    prefill_share: float = 1.0
    debug_invariants: bool = False  # check_integrity() after every step

    def __post_init__(self) -> None:
        if self.policy not in tuple(Policy):
            names = ", ".join(Policy)
            raise ConfigError(
                f"policy is {self.policy!r}; expected one of {names}.",
                "Choose one.",
                param="policy",
            )
        for name, low, high in (("watermark", 0.0, 0.5), ("prefill_share", 0.01, 1.0)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(
                    f"{name} is {value!r}; expected a number from {low} to {high}.",
                    f"Set {name} accordingly.",
                    param=name,
                )
