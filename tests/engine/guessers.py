"""Speculators for tests: right, wrong, and everything between, whatever makes sense to propose."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.core.speculation import Draftable, DraftRoom
from headrace.core.step import StepPlan, StepResult

# A continuation's answer from its first token on, as far as it is known.
Answers = Callable[[Draftable], Sequence[int]]

KINDS = ("right", "wrong", "random", "mixed", "long", "ends", "empty")


@dataclass
class Guesser:
    """Proposes by `kind`, from `answers` where it has to be right. Checks that it is told of every
    sequence in the order that core/speculation.py promises."""

    kind: str
    vocab_size: int
    answers: Answers
    most: int = 6  # of one proposal, but for "long"
    least: int = 0
    seed: int = 0
    asked: int = 0
    proposed: int = 0
    accepted: int = 0
    steps: int = 0
    ended_ids: set[int] = field(default_factory=set)
    open: dict[int, int] = field(default_factory=dict)  # proposed at this length of the sequence

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def waits(self) -> bool:
        return self.least > 0 or (self.kind != "empty" and self._random.random() < 0.8)

    def propose(
        self, sequences: Sequence[Draftable], most: Sequence[int], room: DraftRoom
    ) -> list[list[int]]:
        self.asked += 1
        assert len(sequences) == len(most) <= room.rows
        assert room.context_tokens >= room.rows
        found = []
        for sequence, limit in zip(sequences, most, strict=True):
            assert limit >= 1
            assert sequence.sequence_id not in self.ended_ids
            assert len(sequence.token_ids) > sequence.prompt_tokens
            found.append(self._guess(sequence))
            self.open[sequence.sequence_id] = len(sequence.token_ids)
        return found

    def _guess(self, sequence: Draftable) -> list[int]:
        known = len(sequence.token_ids) - sequence.prompt_tokens
        right = list(self.answers(sequence)[known:])
        dice, size = self._random, self.vocab_size
        some = dice.randint(self.least, self.most)
        if self.kind == "right":
            return right[:some]
        if self.kind == "wrong":
            return [(token + 1) % size for token in right[:some]]
        if self.kind == "random":
            return [dice.randrange(size) for _ in range(some)]
        if self.kind == "mixed":  # right up to somewhere
            at = dice.randint(0, self.most)
            return right[:at] + [dice.randrange(size) for _ in range(some)]
        if self.kind == "long":
            return right + [dice.randrange(size) for _ in range(1000)]
        if self.kind == "ends":  # the last token of the vocabulary ends texts
            return [*right[:some], size - 1, *right[some:]]
        return []

    def taken(self, sequence: Draftable, proposed: int, accepted: int) -> None:
        assert self.open.pop(sequence.sequence_id) == len(sequence.token_ids)
        assert proposed >= 1
        assert 0 <= accepted <= proposed
        self.proposed += proposed
        self.accepted += accepted

    def stepped(self, plan: StepPlan, result: StepResult) -> None:
        self.steps += 1

    def ended(self, sequence: Draftable) -> None:
        assert sequence.sequence_id not in self.ended_ids
        self.ended_ids.add(sequence.sequence_id)
        self.open.pop(sequence.sequence_id, None)
