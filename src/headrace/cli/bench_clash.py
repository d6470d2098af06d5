"""Flags of `headrace bench` that contradict each other, or that nothing would look at.

A flag that is ignored silently makes a run of minutes a run of something else, so each is refused
before anything is sent. Knows the flags' names only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.core.errors import ConfigError

# One excludes the other, and why.
_APART = (
    ("sweep", "hold", "--hold sweeps too, by the objective"),
    ("sweep", "rate", "a sweep chooses its rates"),
    ("hold", "rate", "--hold chooses its rates"),
    ("sweep", "concurrency", "a sweep is an open loop"),
    ("hold", "concurrency", "--hold is an open loop"),
    ("sweep", "requests", "each rate takes --point seconds"),
    ("hold", "requests", "each rate takes --point seconds"),
    ("sweep", "duration", "each rate takes --point seconds"),
    ("hold", "duration", "each rate takes --point seconds"),
    ("sweep", "precision", "each rate takes --point seconds"),
    ("hold", "precision", "each rate takes --point seconds"),
    ("sweep", "warm_up", "the lower rates warm the higher ones up"),
    ("hold", "warm_up", "the lower rates warm the higher ones up"),
    ("concurrency", "max_concurrency", "a closed loop has as many requests at once as clients"),
    ("prompts", "input", "prompts have their own lengths"),
    ("prompts", "turns", "each prompt of a file is a request of its own"),
    ("prompts", "prefixes", "prompts have their own beginnings"),
    ("prompts", "follow_ups", "each prompt of a file is a request of its own"),
)
# One means nothing without any of the others.
_NEEDS = (
    ("hold", ("slo", "workload"), "an objective: --slo, such as ttft=500ms,tpot=50ms"),
    ("point", ("sweep", "hold"), "--sweep or --hold"),
    ("max_concurrency", ("rate", "sweep", "hold", "trace", "workload"), "an open loop: --rate"),
    ("wait", ("turns", "workload"), "a session: --turns"),
    ("follow_ups", ("turns", "workload"), "a session: --turns"),
    ("gpu_model", ("gpu",), "--gpu"),
    ("gpu_precision", ("gpu",), "--gpu"),
    ("gpus", ("gpu",), "--gpu"),
)


def refuse_clashes(given: Mapping[str, Any]) -> None:
    """By names of flags; those that were not given are None, False or 0."""
    for one, other, why in _APART:
        if given[one] and given[other]:
            raise ConfigError(f"{_flag(one)} and {_flag(other)} are given; {why}.", "Give one.")
    for one, others, needed in _NEEDS:
        if given[one] and not any(given[other] for other in others):
            raise ConfigError(
                f"{_flag(one)} is given without {needed}.", "Add it, or leave it out."
            )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
