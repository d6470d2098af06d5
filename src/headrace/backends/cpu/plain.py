"""The step that most steps are: one token of each sequence, and one drawn after it.

It goes to the native program as lists and comes back as lists, in one call. What the general way
(runner.py, draws.py) makes for it, arrays of which most are always the same, took Python longer
than anything else in a step of one sequence. Knows neither prompts nor scores, and no logits but
the model's own: bias, masks and penalties take the general way.
"""

from __future__ import annotations

from collections.abc import Collection

from headrace.backends.cpu import _native
from headrace.backends.cpu.flight import DrawnTokens
from headrace.backends.draws import adjusts_logits, collect_results
from headrace.core.step import Draw, Drawn, EntryResult, StepEntry, StepPlan


def is_plain(plan: StepPlan) -> bool:
    """Whether PlainStep can compute it."""
    if plan.copies or not plan.entries:
        return False
    seen: Draw | None = None  # the last that was looked at: greedy sequences share one
    for entry in plan.entries:
        draw = entry.draw
        if draw is None or len(entry.token_ids) != 1 or entry.targets is not None:
            return False
        if entry.top_logprobs or entry.pool or (draw is not seen and adjusts_logits(draw)):
            return False
        seen = draw
    return True


class PlainStep:
    """A plan that is plain, read; implements `flight.ReadStep`. Computed before another is planned:
    it knows every token."""

    def __init__(self, program: _native.Program, entries: list[StepEntry]) -> None:
        self._program = program
        self._entries = entries
        self._ids = [entry.sequence_id for entry in entries]
        self.sample_s = 0.0

    @property
    def drawing(self) -> Collection[int]:
        return self._ids

    def compute(self, previous: DrawnTokens) -> Drawn | list[EntryResult]:
        entries = self._entries
        draws = [entry.draw for entry in entries if entry.draw is not None]
        tokens, logprobs = self._program.decode(
            [entry.token_ids[0] for entry in entries],
            [entry.start for entry in entries],
            [entry.block_table for entry in entries],
            [_columns(draw) for draw in draws] if any(draw.temperature for draw in draws) else [],
        )
        self.sample_s = self._program.sample_s
        if min(tokens) < 0:  # a failure in the place of a token
            return collect_results(entries, tokens, logprobs, [])
        return Drawn(self._ids, tokens, logprobs)


def _columns(draw: Draw) -> tuple[float, float, float, float, float, float]:
    filters = (draw.top_p, draw.min_p, draw.typical_p, float(draw.top_k))
    return draw.temperature, *filters, draw.uniform
