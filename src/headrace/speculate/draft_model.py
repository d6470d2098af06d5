"""Drafts from a second, smaller model: a runner of its own, with a KV pool of its own.

It computes what it has not seen of a sequence, then draws token after token, for all sequences
together. Tokens that turned out wrong are computed over. A sequence whose prompt it has not yet
computed gets no draft: prompts are computed a part in each step, so that no step waits long. The
runner is only a Runner (core/step.py); no arrays here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.core.speculation import Draftable
from headrace.core.step import DrawParams, Runner, StepPlan
from headrace.speculate.step_curve import StepCurve

CATCH_UP_TOKENS = 128  # of prompts, at most, in one step of the draft model
_GREEDY = DrawParams(temperature=0.0)
_LONGEST_DRAFT = 128  # no draft has more tokens


@dataclass(slots=True)
class _Computed:
    """What the draft model's KV pool has of a sequence."""

    tokens: list[int] = field(default_factory=list)  # those that are computed
    blocks: list[int] = field(default_factory=list)


class DraftModel:
    def __init__(self, runner: Runner, vocab_size: int) -> None:
        """`vocab_size`: tokens that both models have."""
        self._runner = runner
        self._vocab_size = vocab_size
        limits = runner.limits
        self._free = list(range(limits.total_blocks - 1, -1, -1))
        self._sequences: dict[int, _Computed] = {}
        self.curve = StepCurve()
        self._catch_up = min(CATCH_UP_TOKENS, limits.max_batch_tokens)

    def draft_s(self, rows: int, attended: float) -> float:
        """The time of one token for so many sequences; 0.0 before it is known."""
        return self.curve.step_s(rows, attended) or 0.0

    def is_ready(self, sequence: Draftable) -> bool:
        """Whether a draft can begin at once: all but the last few tokens are computed."""
        known = self._sequences.get(sequence.sequence_id)
        if known is None:
            return False
        return len(sequence.token_ids) - _same(known.tokens, sequence.token_ids) <= self._catch_up

    def prepare(self, sequences: Sequence[Draftable]) -> None:
        """Compute a part of what is missing of those that are not ready."""
        plan, left = StepPlan(), self._catch_up
        added: list[tuple[_Computed, list[int]]] = []
        for sequence in sequences:
            if self.is_ready(sequence) or left <= 0 or len(plan) == self._most_rows:
                continue
            known = self._sequences.setdefault(sequence.sequence_id, _Computed())
            start = _same(known.tokens, sequence.token_ids)
            # The last token is left for the first step of a draft, which draws after it.
            tokens = sequence.token_ids[start : min(start + left, len(sequence.token_ids) - 1)]
            if not self._takes(tokens) or not self._hold(known, start + len(tokens)):
                continue
            del known.tokens[start:]
            plan.add(sequence.sequence_id, tokens, start, known.blocks)
            added.append((known, tokens))
            left -= len(tokens)
        if len(plan):
            self._run(plan)
            for known, tokens in added:
                known.tokens += tokens

    def draft(self, sequences: Sequence[Draftable], counts: Sequence[int]) -> list[list[int]]:
        """So many tokens for each sequence; fewer, or none, where the KV pool is full."""
        drafts: list[list[int]] = [[] for _ in sequences]
        wanted = [at for at, count in enumerate(counts) if count and self.is_ready(sequences[at])]
        wanted = wanted[: self._most_rows]
        while wanted:
            plan, rows, left = StepPlan(), [], self._runner.limits.max_batch_tokens
            for at in wanted:
                sequence = sequences[at]
                known = self._sequences[sequence.sequence_id]
                text = sequence.token_ids
                start = len(known.tokens) if drafts[at] else _same(known.tokens, text)
                tokens = drafts[at][-1:] or text[start:]
                fits = len(tokens) <= left and self._takes(tokens)
                if not fits or not self._hold(known, start + len(tokens)):
                    continue
                del known.tokens[start:]
                plan.add(sequence.sequence_id, tokens, start, known.blocks, draw=_GREEDY)
                known.tokens += tokens
                left -= len(tokens)
                rows.append(at)
            if not rows:
                break
            goes_on = []
            for at, drawn in zip(rows, self._run(plan), strict=True):
                if drawn and drawn[0] < self._vocab_size:
                    drafts[at].append(drawn[0])
                    if len(drafts[at]) < counts[at]:
                        goes_on.append(at)
            wanted = goes_on
        return drafts

    def forget(self, sequence: Draftable) -> None:
        known = self._sequences.pop(sequence.sequence_id, None)
        if known is not None:
            self._free += known.blocks

    def close(self) -> None:
        self._runner.close()

    @property
    def held_blocks(self) -> int:
        return self._runner.limits.total_blocks - len(self._free)

    @property
    def _most_rows(self) -> int:
        return self._runner.limits.max_sequences

    def _takes(self, tokens: list[int]) -> bool:
        return bool(tokens) and max(tokens) < self._vocab_size

    def _hold(self, known: _Computed, tokens: int) -> bool:
        """Blocks for so many tokens; False if there are not enough."""
        limits = self._runner.limits
        missing = -(-tokens // limits.block_tokens) - len(known.blocks)
        if tokens > limits.context_tokens or missing > len(self._free):
            return False
        known.blocks += [self._free.pop() for _ in range(missing)]
        return True

    def _run(self, plan: StepPlan) -> list[list[int]]:
        self._runner.submit(plan)
        result = self._runner.collect()
        if plan.batch_tokens == len(plan):
            self.curve.learn(len(plan), sum(plan.starts), result.compute_s)
        return result.tokens


def _same(computed: list[int], text: list[int]) -> int:
    """How many computed tokens are the text's, without its last one: that is always computed again,
    because a draft begins with what is drawn after it. Wrong drafts are at the end, so the
    comparison goes from there."""
    same = min(len(computed), len(text) - 1)
    # What was computed is a beginning of the text, then at most one draft that was wrong in part.
    first = max(0, same - _LONGEST_DRAFT)
    for at in range(first, same):
        if computed[at] != text[at]:
            return at
    return same
