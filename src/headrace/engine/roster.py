"""Who is where: sequences that wait, run or are parked, and the blocks they hold meanwhile.

    waiting   to be admitted; has no blocks, or those it was forked with
    running   may be scheduled
    parked    waits for others of its request or for its grammar, not for room

Moves what it is told to move and keeps the tenants' accounts of it; who deserves a place is
starting.py's to say. Knows no plans.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain

from headrace.core.clock import Clock
from headrace.core.config import SchedulerConfig
from headrace.core.constraint import Constraint
from headrace.engine.blocks import BlockPool
from headrace.engine.constrained import Undecided, close_constraints
from headrace.engine.sequence import Rare, Sequence, Status
from headrace.engine.turns import Turns
from headrace.engine.waiting import WaitingQueue


class Roster:
    def __init__(self, blocks: BlockPool, config: SchedulerConfig, clock: Clock) -> None:
        self.blocks = blocks
        self.undecided = Undecided(clock)
        self.waiting = WaitingQueue(config)
        self.turns = Turns()
        self.running: dict[int, Sequence] = {}
        self.requests: dict[str, list[Sequence]] = {}  # those that have not ended
        self._parked: dict[int, Sequence] = {}
        self._forks: dict[int, Sequence] = {}  # wait for admission, perhaps with blocks
        self._next_id = 0

    def take_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def enter(self, sequence: Sequence) -> None:
        """A request's first sequence queues."""
        request = sequence.request
        self.requests[request.request_id] = [sequence]
        self.turns.join(request.tenant, request.weight)
        self.waiting.push(sequence)

    def start(self, sequence: Sequence) -> None:
        """Its turn has come."""
        self.waiting.remove(sequence)
        self._forks.pop(sequence.sequence_id, None)
        sequence.status = Status.RUNNING
        self.running[sequence.sequence_id] = sequence
        self.turns.of(sequence.request.tenant).running += 1

    def preempt(self, victim: Sequence) -> None:
        """From the running back to the queue, without its blocks."""
        self.lose_blocks(victim)
        victim.status = Status.WAITING
        self._stop_running(victim)
        if victim in self.undecided:  # those behind it in the queue are not to wait for its grammar
            self._parked[victim.sequence_id] = victim
        else:
            self.waiting.push(victim)

    def fork(
        self, parent: Sequence, computed_tokens: int, constraint: Constraint | None = None
    ) -> Sequence:
        """A sequence that shares the parent's blocks of its first `computed_tokens`; it waits to be
        admitted, at its request's place in the queue."""
        blocks = parent.blocks[: self.blocks.blocks_for(computed_tokens)]
        if parent.computed_tokens < computed_tokens:  # preempted meanwhile: start from nothing
            blocks, computed_tokens = [], 0
        full = computed_tokens // self.blocks.block_tokens
        child = Sequence(
            sequence_id=self.take_id(),
            request=parent.request,
            index=parent.index,
            order=parent.order,
            arrival_s=parent.arrival_s,
            max_tokens=parent.max_tokens,
            stop_ids=parent.stop_ids,
            token_ids=list(parent.token_ids),
            seed=parent.seed,
            has_started=True,
            computed_tokens=computed_tokens,
            scheduled_tokens=computed_tokens,
            blocks=blocks,
            keys=parent.keys[:full],
            published_blocks=full,
            draws=parent.draws,
            rare=_inherited(parent.rare, constraint),
            counts_previous=parent.counts_previous,
            epoch=1,  # its prompt was looked up in the prefix cache by its parent
        )
        for block in blocks:
            self.blocks.share(block)
        parent.own_tokens = 0
        self.requests[parent.request.request_id].append(child)
        self._forks[child.sequence_id] = child
        self.turns.join(parent.request.tenant, parent.request.weight)
        self.waiting.push(child)
        return child

    def park(self, sequence: Sequence) -> None:
        """Give up its place among the running: those it waits for may need one."""
        if self._stop_running(sequence):
            sequence.status = Status.WAITING
            self._parked[sequence.sequence_id] = sequence

    def resume(self, sequence: Sequence) -> None:
        """It can go on: if it was parked, it queues at its request's place."""
        if self._parked.pop(sequence.sequence_id, None) is not None:
            self._forks[sequence.sequence_id] = sequence
            self.waiting.push(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Take a sequence out, its blocks with it. Says nothing to anyone."""
        sequence.status = Status.FINISHED
        self.undecided.forget(sequence)
        close_constraints(sequence)
        self._stop_running(sequence)
        self.turns.leave(sequence.request.tenant)
        self._parked.pop(sequence.sequence_id, None)
        self._forks.pop(sequence.sequence_id, None)
        self.waiting.remove(sequence)
        self.blocks.give_back(sequence.blocks)
        sequence.blocks = []
        request_id = sequence.request.request_id
        self.requests[request_id].remove(sequence)
        if not self.requests[request_id]:
            del self.requests[request_id]

    def _stop_running(self, sequence: Sequence) -> bool:
        if self.running.pop(sequence.sequence_id, None) is None:
            return False
        self.turns.of(sequence.request.tenant).running -= 1
        return True

    def idle_blocks(self, keep: Sequence) -> int:
        """Blocks of sequences that wait with some, other than `keep`."""
        return sum(len(s.blocks) for s in self._idle_holders() if s is not keep)

    def reclaim_waiting(self, keep: Sequence | None) -> bool:
        """Take blocks from sequences that wait with some: forks not yet admitted, parked beams."""
        held = [s for s in self._idle_holders() if s is not keep]
        for sequence in held:
            self.lose_blocks(sequence)
        return bool(held)

    def lose_blocks(self, sequence: Sequence) -> None:
        """They go back to the pool; what was computed into them will be computed again."""
        self.blocks.give_back(sequence.blocks)
        sequence.hold_blocks([])
        sequence.computed_tokens = sequence.scheduled_tokens = sequence.published_blocks = 0
        sequence.own_tokens = 0
        sequence.epoch += 1

    def _idle_holders(self) -> list[Sequence]:
        return [s for s in chain(self._forks.values(), self._parked.values()) if s.blocks]

    def check_integrity(self) -> None:
        """Blocks are held by those who think they hold them; everyone is where they think."""
        live = [s for sequences in self.requests.values() for s in sequences]
        self.blocks.check_integrity(s.blocks for s in live)
        assert self.waiting or not self.waiting.tokens, "nobody waits, with tokens to compute"
        accounts = {turn.tenant: (turn.live, turn.running) for turn in self.turns.active}
        tenants = Counter(s.request.tenant for s in live)
        places = Counter(s.request.tenant for s in self.running.values())
        assert accounts == {t: (n, places[t]) for t, n in tenants.items()}, "turns miscounted"
        for sequence in live:
            running = sequence.sequence_id in self.running
            assert running == (sequence.status is Status.RUNNING), "running, and not known as such"
            assert sequence.computed_tokens <= sequence.scheduled_tokens, "computed before its time"
            size, at = self.blocks.block_tokens, sequence.scheduled_tokens
            assert at <= len(sequence.blocks) * size, "computed outside its blocks"
            own = sequence.blocks[at // size : sequence.own_tokens // size]
            assert all(map(self.blocks.is_writable, own)), "its own blocks are others' too"


def _inherited(rare: Rare | None, constraint: Constraint | None) -> Rare | None:
    """What a fork has of what is rare: its parent's beams and scores, a constraint of its own."""
    if rare is None or (rare.beams is None and constraint is None):
        return None
    return Rare(beams=rare.beams, constraint=constraint, prompt_scores=rare.prompt_scores)
