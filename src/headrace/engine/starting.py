"""Fills a step's budget for prompts: prompts under way and sequences that start now, by tenant.

A sequence starts if there is a slot and there are enough blocks, beyond those that the prefix cache
has for it. If a tenant has more than its share of slots or blocks while another waits, its newest
sequence is preempted; so is a tenant's only sequence once its time slice is over. Moves sequences;
the scheduler writes their rows. With one tenant nothing is preempted here, and the policy decides
the order.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from headrace.core.clock import Clock
from headrace.core.config import SchedulerConfig
from headrace.core.request import Started
from headrace.core.step import RunnerLimits
from headrace.engine.admission import Admission
from headrace.engine.next_plan import NextPlan
from headrace.engine.policy import victim_key
from headrace.engine.prefix import PrefixCache
from headrace.engine.roster import Roster
from headrace.engine.sequence import Sequence, Status
from headrace.engine.turns import Turn

log = logging.getLogger(__name__)

STARTED_KEPT = 4096
# A slot may become free by itself: the next tenant waits this many steps before another gives way.
PATIENCE_STEPS = 1
GIVING_SHARE = 16  # at most one in this many slots gives way per step, to bound the cost of a burst
# A tenant's last running sequence gives way to a tenant with none when its tenant has had this many
# tokens more, plus twice the sequence's tokens, so that recomputing them is the smaller part.
SLICE_TOKENS = 256
# A tenant may start before one that waits for blocks if it has had at most this many tokens more.
BYPASS_TOKENS = 2048


class Starting:
    def __init__(
        self,
        *,
        limits: RunnerLimits,
        config: SchedulerConfig,
        clock: Clock,
        roster: Roster,
        prefix: PrefixCache,
        admission: Admission,
        compute: Callable[[Sequence, int, NextPlan], None],
    ) -> None:
        self._config = config
        self._clock = clock
        self._roster = roster
        self._running, self._waiting = roster.running, roster.waiting
        self._turns = roster.turns
        self._blocks = roster.blocks
        self._prefix = prefix
        self._admission = admission
        self._compute = compute  # adds this many tokens of a sequence to the plan
        self._batch_tokens = limits.max_batch_tokens
        self.slots = min(limits.max_sequences, limits.max_batch_tokens)
        self._most_given = max(1, self.slots // GIVING_SHARE)
        # Started requests, until they are read; the oldest are dropped if nobody reads them.
        self.started: deque[Started] = deque(maxlen=STARTED_KEPT)
        # State of the step being planned.
        self._spare: int | None = None  # cached: looking ahead for each sequence would be quadratic
        self._given = 0
        self._is_full = False
        self._blocked: set[str] = set()  # tenants whose first sequence can't start
        self._bound = math.inf  # tenants that have had more may not start before them

    def fill(self, prompts: list[Sequence], plan: NextPlan) -> None:
        """Use a plan's prompt budget for `prompts`, which are running, and for new sequences."""
        turns = self._turns
        if turns.is_shared:
            for sequence, count in zip(plan.sequences.values(), plan.plan.counts, strict=True):
                turns.charge(sequence.request.tenant, count)
        if prompts or len(self._waiting):
            self._spare, self._given, self._is_full = None, 0, False
            self._blocked.clear()
            self._bound = math.inf
            self._fill(prompts, plan)
        if not turns.is_shared:
            turns.charge_all(self._batch_tokens - plan.budget)

    def _fill(self, prompts: list[Sequence], plan: NextPlan) -> None:
        under_way: defaultdict[str, deque[Sequence]] = defaultdict(deque)
        for sequence in prompts:
            under_way[sequence.request.tenant].append(sequence)
        if not plan.budget:  # decoding takes all of it; a sequence may have to give way
            self._make_way_for_next(plan)
        while plan.room:
            turn = self._turns.next(self._candidates(under_way))
            if turn is None:
                return
            if under_way[turn.tenant]:
                self._go_on(under_way[turn.tenant].popleft(), plan)
            elif (first := self._waiting.first(turn.tenant)) is not None:
                if self._start(turn, first, plan):
                    self._go_on(first, plan)
                else:
                    self._blocked.add(turn.tenant)

    def _candidates(self, under_way: Mapping[str, Collection[Sequence]]) -> Iterator[Turn]:
        for turn in self._turns.active:
            if under_way.get(turn.tenant) or (
                not self._is_full
                and self._waiting.count(turn.tenant)
                and turn.tenant not in self._blocked
                and (self._bound == math.inf or (not turn.running and turn.had <= self._bound))
            ):
                yield turn

    def _go_on(self, sequence: Sequence, plan: NextPlan) -> None:
        if sequence.status is not Status.RUNNING or not plan.room:  # preempted in this step
            return
        before = sequence.scheduled_tokens
        self._compute(sequence, min(sequence.wanted_tokens, plan.room), plan)
        if self._turns.is_shared:
            tokens = max(0, sequence.scheduled_tokens - before)
            self._turns.charge(sequence.request.tenant, tokens)

    # -- starting ------------------------------------------------------------------------------

    def _start(self, turn: Turn, sequence: Sequence, plan: NextPlan) -> bool:
        # It was preempted while its last token is being drawn: that token must be known first.
        if sequence.wanted_tokens == 0:
            return False
        found = self._find_place(sequence)
        if found is not None:
            turn.passed_over = 0
        while found is None:
            if not self._make_way(turn, sequence, plan):
                turn.passed_over += 1
                self._is_full = len(self._running) >= self.slots
                self._bound = min(self._bound, turn.had + BYPASS_TOKENS)
                return False
            found = self._find_place(sequence)
        self._run(sequence, found)
        return True

    def _find_place(self, sequence: Sequence) -> list[int] | None:
        """The cached blocks for its prefix, if there is a slot and there are blocks for the rest;
        else None."""
        if len(self._running) >= self.slots:
            return None
        while True:
            found = self._find_prefix(sequence)
            held = self._roster.idle_blocks(sequence)
            if self._spare is None:
                self._spare = self._admission.spare_blocks(self._running.values())
            self._spare -= self._admission.most_blocks(sequence)
            if self._spare >= held or self._admission.fits(
                sequence, found, self._running.values(), held
            ):
                return found
            self._spare = None
            if self._running or not self._roster.reclaim_waiting(sequence):
                return None

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """The cached blocks for its prefix that it does not hold yet."""
        if not self._config.prefix_cache or sequence.blocks or sequence.request.embed:
            return []  # an embedding needs all tokens' hidden states, which are not cached
        params = sequence.request.params
        if params.prompt_logprobs is not None and not sequence.generated_tokens:
            return []  # every prompt token has to be scored
        return self._prefix.match(sequence.token_ids, sequence.keys, sequence.request.cache_salt)

    def _run(self, sequence: Sequence, found: list[int]) -> None:
        if self._config.prefix_cache and sequence.epoch == 0 and not sequence.blocks:
            request = sequence.request
            if request.params.prompt_logprobs is None and not request.embed:
                self._prefix.count(sequence.token_ids, sequence.keys, len(found))
        for block in found:
            self._blocks.share(block)
        if found:
            sequence.blocks = found
            sequence.published_blocks = len(found)
            sequence.computed_tokens = len(found) * self._blocks.block_tokens
            sequence.scheduled_tokens = sequence.computed_tokens
        if not sequence.has_started:
            self._note_start(sequence)
        self._roster.start(sequence)

    def _note_start(self, sequence: Sequence) -> None:
        sequence.has_started = True
        self.started.append(
            Started(
                request_id=sequence.request.request_id,
                waited_s=self._clock.now_s() - sequence.arrival_s,
                cached_tokens=sequence.computed_tokens,
            )
        )

    # -- giving way ----------------------------------------------------------------------------

    def heaviest(self) -> Sequence:
        """The sequence to preempt when no blocks are left: of the tenant that holds the most blocks
        for its weight, the newest sequence of the lowest priority."""
        if not self._turns.is_shared:
            return _newest(self._running.values())
        held = self._held_blocks()
        tenant = max(held, key=lambda each: held[each] / self._turns.of(each).weight)
        return _newest(self._of(tenant))

    def _make_way_for_next(self, plan: NextPlan) -> None:
        turn = self._turns.next(t for t in self._turns.active if self._waiting.count(t.tenant))
        if turn is None or (sequence := self._waiting.first(turn.tenant)) is None:
            return
        if sequence.wanted_tokens and not self._make_way(turn, sequence, plan):
            turn.passed_over += 1

    def _make_way(self, turn: Turn, sequence: Sequence, plan: NextPlan) -> bool:
        """Preempt another tenant's sequence for the tenant that is next, if one should give way."""
        if not self._turns.is_shared or turn.passed_over < PATIENCE_STEPS:
            return False
        if self._given >= self._most_given:
            return False
        victim = self._find_giver(turn, sequence)
        if victim is None:
            return False
        self._given += 1
        self._spare = None
        self._turns.of(victim.request.tenant).gave_way += 1
        log.debug(
            "sequence %d of request %s gives way to request %s",
            victim.sequence_id,
            victim.request.request_id,
            sequence.request.request_id,
        )
        plan.remove(victim)
        self._roster.preempt(victim)
        return True

    def _find_giver(self, turn: Turn, sequence: Sequence) -> Sequence | None:
        if len(self._running) >= self.slots:
            whole, wanted = self.slots, 1
            held = {each.tenant: each.running for each in self._turns.active}
        else:
            whole = self._blocks.total_blocks
            wanted = self._blocks.blocks_for(len(sequence.token_ids)) + 1 - len(sequence.blocks)
            held = self._held_blocks()
        turns = self._turns
        if not turn.running or held[turn.tenant] + wanted <= turns.share(turn, whole):
            over = [
                each
                for each in turns.active
                if each is not turn
                and each.running > 1  # not its last one: the two would only swap places
                and held[each.tenant] > turns.share(each, whole)
            ]
            if over:
                return _newest(
                    self._of(max(over, key=lambda each: held[each.tenant] / each.weight).tenant)
                )
        return None if turn.running else self._past_its_slice(turn)

    def _past_its_slice(self, turn: Turn) -> Sequence | None:
        """A sequence of the tenant that has had most, if its slice is over: with more tenants than
        slots, tenants take turns."""
        others = [each for each in self._turns.active if each.running and each is not turn]
        most = max(others, key=lambda each: each.had, default=None)
        if most is None:
            return None
        victim = _newest(self._of(most.tenant))
        slice_tokens = SLICE_TOKENS + 2 * len(victim.token_ids)
        return victim if (most.had - turn.had) * most.weight >= slice_tokens else None

    def _held_blocks(self) -> defaultdict[str, int]:
        """Blocks of running sequences, by tenant."""
        held: defaultdict[str, int] = defaultdict(int)
        for sequence in self._running.values():
            held[sequence.request.tenant] += len(sequence.blocks)
        return held

    def _of(self, tenant: str) -> list[Sequence]:
        return [s for s in self._running.values() if s.request.tenant == tenant]


def _newest(sequences: Iterable[Sequence]) -> Sequence:
    """The newest sequence of the lowest priority."""
    return max(
        sequences,
        key=lambda s: (victim_key(priority=s.request.priority, order=s.order), s.sequence_id),
    )
