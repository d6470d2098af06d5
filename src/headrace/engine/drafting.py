"""Guesses in the scheduler: asked for, cut to what a step can use, and judged by what was drawn.

Rows of sequences that decode are extended by the speculator's guesses. A guess that equals the
drawn token is right, and the token drawn after it counts too; from the first wrong one on, what was
computed is forgotten. Guesses take blocks that are free, and never anybody's place. Knows no
drafter, and not whether guesses pay.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from itertools import chain
from typing import TypeVar

from headrace.core.clock import Clock
from headrace.core.constraint import Constraint, Foreseen
from headrace.core.speculation import DraftRoom, Speculator
from headrace.core.step import PREVIOUS, StepPlan, StepResult
from headrace.engine.blocks import BlockPool
from headrace.engine.next_plan import NextPlan
from headrace.engine.sequence import NOTHING_FORESEEN, Rare, Sequence
from headrace.engine.stats import DraftStats

log = logging.getLogger(__name__)

T = TypeVar("T")

# Given the decoding sequences of each tenant: the most guesses of each, or None for any number.
Shares = Callable[["Counter[str]"], "dict[str, int] | None"]


# Of a grammar's next tokens that it leaves no choice about, how many it is asked for.
FORCED_TOKENS = 16
PATIENCE_S = 0.002  # for all grammars together to look ahead: most take a tenth of this


class Drafting:
    def __init__(
        self,
        speculator: Speculator,
        pool: BlockPool,
        stats: DraftStats,
        shares: Shares,
        clock: Clock,
    ) -> None:
        self._speculator: Speculator | None = speculator  # None once it has failed
        self._pool = pool
        self._stats = stats
        self._shares = shares
        self._clock = clock
        self._is_in_flight = False  # a plan with guesses: there is no other
        self._late: set[int] = set()  # sequences whose grammars did not look ahead in time

    # -- planning ------------------------------------------------------------------------------

    def waits(self) -> bool:
        """Whether to plan nothing before the step in flight is committed. If that has guesses, a
        second step would be computed for the few sequences that have none; if it has none, there
        can be guesses only when its tokens are known."""
        return self._is_in_flight or bool(self._safely(lambda speculator: speculator.waits()))

    def add(self, new: NextPlan) -> None:
        """Extend the rows of a plan, which has only decoding sequences, by guesses."""
        plan = new.plan
        rows = [
            (row, sequence, most)
            for row, sequence in enumerate(new.sequences.values())
            if (most := sequence.full_tokens - len(sequence.token_ids) - 1) > 0
            and sequence.beams is None
            and plan.token_ids[row] != PREVIOUS
        ]
        if not rows:
            return
        began_s = self._clock.now_s()
        self._extend(new, rows)
        self._stats.drafting_s += self._clock.now_s() - began_s

    def _extend(self, new: NextPlan, rows: list[tuple[int, Sequence, int]]) -> None:
        """`rows` are those that can have guesses, with their sequence and the most of them."""
        plan = new.plan
        room = DraftRoom(
            rows=len(plan), context_tokens=sum(plan.starts) + len(plan), most_tokens=new.budget
        )
        sequences, mosts = [sequence for _, sequence, _ in rows], [most for _, _, most in rows]
        self._hear(sequences)
        proposed = self._safely(lambda speculator: speculator.propose(sequences, mosts, room))
        if proposed is None or not any(proposed):
            return
        proposed = self._cut_by_grammars(sequences, mosts, proposed)
        shares = self._shares(Counter(s.request.tenant for s in new.sequences.values()))
        left = room.most_tokens
        for (row, sequence, most), guesses in zip(rows, proposed, strict=True):
            tenant = sequence.request.tenant
            fit = min(most, left if shares is None else min(left, shares[tenant]))
            some = self._cut(sequence, guesses[:fit], len(plan)) if fit > 0 and guesses else []
            if some:
                left -= len(some)
                if shares is not None:
                    shares[tenant] -= len(some)
                masks = () if sequence.rare is None else sequence.rare.foreseen.masks[: len(some)]
                plan.drafts[row] = sequence.drafts_after(some, masks)
                plan.counts[row] += len(some)
                sequence.guess(some)
        if plan.drafts:
            plan.token_ids = list(
                chain.from_iterable(
                    (token, *sequence.guesses) if row in plan.drafts else (token,)
                    for row, (token, sequence) in enumerate(
                        zip(plan.token_ids, new.sequences.values(), strict=True)
                    )
                )
            )

    def _cut(self, sequence: Sequence, guesses: Sequences[int], rows: int) -> list[int]:
        """The guesses before the first that would end the sequence, as far as there are blocks."""
        ends = (at for at, guess in enumerate(guesses) if guess in sequence.stop_ids)
        some = list(guesses[: next(ends, None)])
        known, size = sequence.scheduled_tokens, self._pool.block_tokens
        needed = self._pool.blocks_for(known + len(some)) - len(sequence.blocks)
        # Every other row may need a block soon: guesses do not take the last ones.
        spare = self._pool.available_blocks - rows
        for _ in range(min(needed, spare)):
            sequence.blocks.append(self._pool.take())
        sequence.own_tokens = len(sequence.blocks) * size
        return some[: sequence.own_tokens - known]

    def _hear(self, sequences: Sequences[Sequence]) -> None:
        """Take what grammars were asked by `look_ahead`."""
        until_s = self._clock.now_s() + PATIENCE_S
        for sequence in sequences:
            if sequence.rare is not None and sequence.rare.constraint is not None:
                seen = self._foreseen(sequence.sequence_id, sequence.rare.constraint, until_s)
                sequence.rare.foreseen = seen or NOTHING_FORESEEN

    def _cut_by_grammars(
        self,
        sequences: Sequences[Sequence],
        most: Sequences[int],
        proposed: Sequences[Sequences[int]],
    ) -> list[Sequences[int]]:
        """The guesses before the first that its grammar refuses. Afterwards `foreseen` has a mask
        for each. A grammar that is late has only those that were forced."""
        found: list[Sequences[int]] = []
        asked: list[tuple[int, Rare]] = []
        for at, (sequence, guesses) in enumerate(zip(sequences, proposed, strict=True)):
            rare = sequence.rare
            if rare is not None and rare.constraint is not None and guesses:
                known = rare.foreseen.token_ids
                some = guesses[: most[at]]
                guesses = some[: _same(some, known)]
                if len(guesses) < len(some):
                    with contextlib.suppress(Exception):  # the next mask will say what it was
                        rare.constraint.foresee(*some)
                        asked.append((at, rare))
            found.append(guesses)
        until_s = self._clock.now_s() + PATIENCE_S
        for at, rare in asked:
            assert rare.constraint is not None
            seen = self._foreseen(sequences[at].sequence_id, rare.constraint, until_s)
            if seen is not None:
                rare.foreseen = seen
                found[at] = seen.token_ids
        return found

    def _foreseen(
        self, sequence_id: int, constraint: Constraint, until_s: float
    ) -> Foreseen | None:
        """What a grammar was asked, if it answers in time. One that was late is not waited for
        until it is fast again: others must not wait for their tokens. An error is no error of the
        request: the grammar is asked again for its next mask."""
        left_s = max(0.0, until_s - self._clock.now_s())
        try:
            seen = constraint.foreseen(0.0 if sequence_id in self._late else left_s)
        except Exception:
            return None
        (self._late.discard if seen is not None else self._late.add)(sequence_id)
        return seen

    def look_ahead(self, constraint: Constraint) -> None:
        """Ask a grammar for the tokens that are sure to come next. Its answer is not waited for."""
        constraint.foresee(forced=FORCED_TOKENS)

    def planned(self, plan: StepPlan) -> None:
        self._is_in_flight = bool(plan.drafts)

    # -- results -------------------------------------------------------------------------------

    def judge(self, sequence: Sequence, tokens: list[int]) -> tuple[int, int]:
        """Compare a sequence's guesses with what was drawn at their places. Returns how many are
        right, and how many are wrong."""
        guesses = sequence.take_guesses()
        right = _same(guesses, tokens)  # fewer tokens than guesses, if a place failed
        self._stats.count(len(guesses), right)
        self._safely(lambda speculator: speculator.taken(sequence, len(guesses), right))
        return right, len(guesses) - right

    def committed(self, plan: StepPlan, result: StepResult) -> None:
        self.failed()
        self._safely(lambda speculator: speculator.stepped(plan, result))

    def failed(self) -> None:
        """The oldest plan is not in flight any more. One with guesses is the only one."""
        self._is_in_flight = False

    def ended(self, sequence: Sequence) -> None:
        self._late.discard(sequence.sequence_id)
        self._safely(lambda speculator: speculator.ended(sequence))

    def _safely(self, call: Callable[[Speculator], T]) -> T | None:
        """A speculator is not needed for any answer: if it fails, there is none from then on."""
        if self._speculator is None:
            return None
        try:
            return call(self._speculator)
        except Exception:
            log.exception("guessing tokens failed; the engine goes on without")
            self._speculator = None
            return None


def _same(some: Sequences[int], others: Sequences[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(some), len(others)))
