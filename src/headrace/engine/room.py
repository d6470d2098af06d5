"""Blocks for the tokens of a row: from the pool, or from sequences that have to give way.

First those that hold blocks for nothing, or without running, lose them, then the heaviest running
sequence, and so on until there are enough. A block that others hold too is copied before it is
written. Knows the roster and the plan being written; who is heaviest, starting.py says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from headrace.engine.next_plan import NextPlan
from headrace.engine.roster import Roster
from headrace.engine.sequence import Sequence
from headrace.engine.stats import EngineStats

log = logging.getLogger(__name__)


class Room:
    def __init__(
        self, roster: Roster, stats: EngineStats, heaviest: Callable[[], Sequence]
    ) -> None:
        self._roster = roster
        self._pool = roster.blocks
        self._stats = stats
        self._heaviest = heaviest

    def make(self, sequence: Sequence, start: int, end: int, new: NextPlan) -> bool:
        """Get blocks for positions start..end. Copies the first one if it is shared."""
        pool = self._pool
        at, held = start // pool.block_tokens, len(sequence.blocks)
        copy = at < held and not pool.is_writable(sequence.blocks[at])
        needed = -(-end // pool.block_tokens) - held + copy
        if needed <= 0:
            sequence.own_tokens = held * pool.block_tokens
            return True
        while pool.available_blocks < needed:
            if self._roster.reclaim_surplus() or self._roster.reclaim_waiting(None):
                continue
            victim = self._heaviest()
            self._preempt(victim, new)
            if victim is sequence:
                return False
        if copy:
            old, fresh = sequence.blocks[at], pool.take()
            new.plan.copies.append((old, fresh))
            sequence.hold_blocks([*sequence.blocks[:at], fresh, *sequence.blocks[at + 1 :]])
            pool.give_back([old])
            sequence.published_blocks = min(sequence.published_blocks, at)
            self._stats.cow_copies += 1
            needed -= 1
        for _ in range(needed):
            sequence.blocks.append(pool.take())
        sequence.own_tokens = len(sequence.blocks) * pool.block_tokens
        return True

    def _preempt(self, victim: Sequence, new: NextPlan) -> None:
        lost = victim.computed_tokens
        new.remove(victim)
        self._stats.preemptions += 1
        self._stats.preempted_tokens += lost
        log.warning(
            "preempted sequence %d of request %s: %d computed tokens will be computed again "
            "(%d sequences running, %d blocks in the pool)",
            victim.sequence_id,
            victim.request.request_id,
            lost,
            len(self._roster.running),
            self._pool.total_blocks,
        )
        self._roster.preempt(victim)
