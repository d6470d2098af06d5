"""How much the probes ask for, within limits that hold for every endpoint; and how that is said.

Numbers only: probe.py does the asking.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

LIMIT_S = 60.0
LIMIT_TOKENS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much of each kind is asked for."""

    repeats: int = 5
    short_tokens: int = 24  # of the prompt's words; a chat template adds its own
    answer_tokens: int = 24
    medium_tokens: int = 512
    long_tokens: int = 2048
    long_repeats: int = 2
    prefix_tokens: int = 760
    prefix_pairs: int = 4
    concurrency: int = 8
    bursts: int = 5
    burst_tokens: int = 32
    stream_tokens: int = 160
    compared: int = 3  # grammars, penalties and plain answers
    sizes: tuple[int, ...] = (2, 8, 16, 64)  # words of bare prompts
    size_repeats: int = 4
    schema: Mapping[str, Any] | None = None  # that answers with a grammar have; None: a small one
    limit_s: float = LIMIT_S
    limit_tokens: int = LIMIT_TOKENS

    @property
    def tokens(self) -> int:
        """What all of it takes, about."""
        both = self.short_tokens + 30  # with a chat template
        return (
            self.repeats * (both + self.answer_tokens)
            + self.long_repeats * (self.medium_tokens + self.long_tokens + 60)
            + self.prefix_pairs * (2 * (self.prefix_tokens + 30) + 30)
            + self.bursts * self.concurrency * (both + self.burst_tokens)
            + self.bursts * (both + self.answer_tokens)
            + self.stream_tokens + self.long_tokens + 120
            + 4 * self.compared * (both + self.answer_tokens + 30)
            + self.size_repeats * (sum(self.sizes) + 4 * len(self.sizes))
        )  # fmt: skip


def fitted(plan: Plan, context_tokens: float | None) -> Plan:
    """Prompts of at most half of the context."""
    if context_tokens is None:
        return plan
    half = int(context_tokens) // 2
    return replace(
        plan,
        medium_tokens=min(plan.medium_tokens, max(half // 4, 32)),
        long_tokens=min(plan.long_tokens, half),
        prefix_tokens=min(plan.prefix_tokens, half),
        stream_tokens=min(plan.stream_tokens, half),
        burst_tokens=min(plan.burst_tokens, half),
    )


def announcement(plan: Plan, url: str) -> str:
    requests = (
        plan.repeats + 2 * plan.long_repeats + 4 * plan.prefix_pairs
        + plan.bursts * (plan.concurrency + 1) + 2 + 4 * plan.compared
        + plan.size_repeats * len(plan.sizes)
    )  # fmt: skip
    return (
        f"Probing {url}: about {requests} requests and {plan.tokens:,} tokens, up to "
        f"{plan.concurrency} at a time; at most {plan.limit_s:g} s and {plan.limit_tokens:,} "
        "tokens. --no-probe reads only."
    )
