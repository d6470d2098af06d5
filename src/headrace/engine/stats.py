"""What the scheduler counted since it started. Plain numbers; someone else names and shows them."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.engine.prefix import PrefixStats


@dataclass(slots=True)
class EngineStats:
    prefix: PrefixStats
    steps: int = 0
    prompt_tokens: int = 0  # computed, of prompts; recomputation counts again
    generated_tokens: int = 0
    preemptions: int = 0
    preempted_tokens: int = 0  # computed and lost
    cow_copies: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # by reason

    @property
    def prefix_queries_tokens(self) -> int:
        return self.prefix.queries_tokens

    @property
    def prefix_hits_tokens(self) -> int:
        return self.prefix.hits_tokens

    @property
    def prefix_misses(self) -> dict[str, int]:
        return self.prefix.misses
