"""What the scheduler has counted since it started, and its current queue. Plain numbers; the
server's metrics name and show them."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, field

from headrace.core.histogram import STEP_TOKEN_BOUNDS, Histogram
from headrace.engine.prefix import PrefixStats
from headrace.engine.turns import Turns
from headrace.engine.waiting import WaitingQueue


@dataclass(slots=True)
class DraftStats:
    """Guesses that were checked."""

    drafts: int = 0  # rows of steps that ended in some
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)  # by place in the draft, from the first
    drafting_s: float = 0.0  # to decide on guesses and make them: a part of `schedule_s`

    def count(self, proposed: int, accepted: int) -> None:
        self.drafts += 1
        self.draft_tokens += proposed
        self.accepted_tokens += accepted
        self.accepted_at += [0] * (proposed - len(self.accepted_at))
        for place in range(accepted):
            self.accepted_at[place] += 1


@dataclass(slots=True)
class EngineStats:
    prefix: PrefixStats
    waiting: WaitingQueue
    running: Sized
    turns: Turns
    steps: int = 0
    prompt_tokens: int = 0  # computed, of prompts; recomputation counts again
    generated_tokens: int = 0
    preemptions: int = 0
    preempted_tokens: int = 0  # computed and lost
    cow_copies: int = 0
    # Of each step: prompt tokens computed and tokens generated.
    step_tokens: Histogram = field(default_factory=lambda: Histogram(STEP_TOKEN_BOUNDS))
    finished: dict[str, int] = field(default_factory=dict)  # by reason
    drafts: DraftStats = field(default_factory=DraftStats)
    # Where the time of all steps went, by the engine's clock. Times overlap: one step is computed
    # while the next one is scheduled and the last one is committed.
    schedule_s: float = 0.0
    compute_s: float = 0.0  # without sampling
    sample_s: float = 0.0
    commit_s: float = 0.0

    @property
    def running_sequences(self) -> int:
        return len(self.running)

    @property
    def waiting_sequences(self) -> int:
        return len(self.waiting)

    @property
    def waiting_prompt_tokens(self) -> int:
        """Tokens of waiting sequences to compute before each can draw: prompts, and preempted
        sequences' tokens."""
        return self.waiting.tokens

    @property
    def prefix_queries_tokens(self) -> int:
        return self.prefix.queries_tokens

    @property
    def prefix_hits_tokens(self) -> int:
        return self.prefix.hits_tokens

    @property
    def prefix_misses(self) -> dict[str, int]:
        return self.prefix.misses
