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
    # Of the pool: what admission leaves free, so that running sequences can grow.
    watermark: float = 0.02
    # SHORTEST: a second of waiting counts as so many prompt tokens less.
    ageing_tokens_per_s: float = 200.0
    # A step in which prompts join others' decoding may take so many times as long as one without.
    max_step_growth: float = 2.0
    debug_invariants: bool = False  # check_integrity() after every step

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
