"""Which state each sequence is in (waiting, running or parked), and the blocks it holds.

    waiting   to be admitted; has no blocks, or those it was forked with
    running   may be scheduled
    parked    waits for other sequences of its request, for its grammar or for blocks of its prefix
              from a store, not for a slot

Moves sequences when it is told to, and keeps the tenants' accounts up to date; starting.py decides
which sequence starts. Knows no plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
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
        self.on_drop: Callable[[Sequence], None] | None = None  # told of every sequence that ends

    def take_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def enter(self, sequence: Sequence, *, is_held: bool = False) -> None:
        """Queue the first sequence of a request; if it is held, when it is resumed."""
        request = sequence.request
        self.requests[request.request_id] = [sequence]
        self.turns.join(request.tenant, request.weight)
        if is_held:
            self._parked[sequence.sequence_id] = sequence
        else:
            self.waiting.push(sequence)

    def start(self, sequence: Sequence) -> None:
        """Move it from waiting to running."""
        self.waiting.remove(sequence)
        self._forks.pop(sequence.sequence_id, None)
        sequence.status = Status.RUNNING
        self.running[sequence.sequence_id] = sequence
        self.turns.of(sequence.request.tenant).running += 1

    def preempt(self, victim: Sequence) -> None:
        """Move it from running back to waiting, without its blocks."""
        self.lose_blocks(victim)
        victim.status = Status.WAITING
        self._stop_running(victim)
        if victim in self.undecided:  # others in the queue must not wait for its grammar
            self._parked[victim.sequence_id] = victim
        else:
            self.waiting.push(victim)

    def fork(
        self, parent: Sequence, computed_tokens: int, constraint: Constraint | None = None
    ) -> Sequence:
        """A new sequence that shares the blocks of its parent's first `computed_tokens`. It waits
        for admission at its request's place in the queue."""
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
        """Move it from running to parked: the sequences it waits for may need its slot."""
        if self._stop_running(sequence):
            sequence.status = Status.WAITING
            self._parked[sequence.sequence_id] = sequence

    def resume(self, sequence: Sequence) -> None:
        """If it is parked, queue it again at its request's place."""
        if self._parked.pop(sequence.sequence_id, None) is not None:
            self._forks[sequence.sequence_id] = sequence
            self.waiting.push(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Remove a sequence and release its blocks. Creates no event."""
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
        if self.on_drop is not None:
            self.on_drop(sequence)
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
        """Blocks held by sequences that are not running, except `keep`."""
        return sum(len(s.blocks) for s in self._idle_holders() if s is not keep)

    def reclaim_waiting(self, keep: Sequence | None) -> bool:
        """Take the blocks of sequences that are not running: waiting forks and parked beams."""
        held = [s for s in self._idle_holders() if s is not keep]
        for sequence in held:
            self.lose_blocks(sequence)
        return bool(held)

    def reclaim_surplus(self) -> bool:
        """Take the blocks that running sequences hold for guesses that turned out wrong."""
        found = False
        for sequence in self.running.values():
            kept = self.blocks.blocks_for(sequence.scheduled_tokens + 1)
            if len(sequence.blocks) > kept:
                self.blocks.give_back(sequence.blocks[kept:])
                sequence.hold_blocks(sequence.blocks[:kept])
                most = kept * self.blocks.block_tokens
                sequence.own_tokens = min(sequence.own_tokens, most)
                found = True
        return found

    def lose_blocks(self, sequence: Sequence) -> None:
        """Return its blocks to the pool; its tokens will have to be computed again."""
        self.blocks.give_back(sequence.blocks)
        sequence.hold_blocks([])
        sequence.computed_tokens = sequence.scheduled_tokens = sequence.published_blocks = 0
        sequence.own_tokens = 0
        sequence.epoch += 1

    def _idle_holders(self) -> list[Sequence]:
        return [s for s in chain(self._forks.values(), self._parked.values()) if s.blocks]

    def check_integrity(self) -> None:
        """Sequences and pool agree about who holds which block, and each sequence is in the state
        that its status says."""
        live = [s for sequences in self.requests.values() for s in sequences]
        self.blocks.check_integrity(s.blocks for s in live)
        assert self.waiting or not self.waiting.tokens, "waiting tokens without sequence"
        accounts = {turn.tenant: (turn.live, turn.running) for turn in self.turns.active}
        tenants = Counter(s.request.tenant for s in live)
        places = Counter(s.request.tenant for s in self.running.values())
        assert accounts == {t: (n, places[t]) for t, n in tenants.items()}, "turns miscounted"
        for sequence in live:
            running = sequence.sequence_id in self.running
            assert running == (sequence.status is Status.RUNNING), "status and running set disagree"
            assert sequence.computed_tokens <= sequence.scheduled_tokens, "computed, not scheduled"
            size, at = self.blocks.block_tokens, sequence.scheduled_tokens
            assert at <= len(sequence.blocks) * size, "computed outside its blocks"
            own = sequence.blocks[at // size : sequence.own_tokens // size]
            assert all(map(self.blocks.is_writable, own)), "its own blocks are shared"


def _inherited(rare: Rare | None, constraint: Constraint | None) -> Rare | None:
    """The rare fields of a fork: its parent's beams and scores, and its own constraint."""
    if rare is None or (rare.beams is None and constraint is None):
        return None
    return Rare(beams=rare.beams, constraint=constraint, prompt_scores=rare.prompt_scores)
