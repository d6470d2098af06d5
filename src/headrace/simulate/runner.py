"""A Runner that computes nothing: it keeps a hash of every prefix in the blocks, and moves a clock.

What it draws depends on a sequence's tokens alone, found through block tables as a model would
find them: an engine that mixes up blocks gets other tokens, or an error. A plan is checked when it
is submitted, and executed when it is collected, so that plans in flight are really in flight. Does
not know why a plan is as it is, nor real time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.core.clock import VirtualClock
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.step import (
    PREVIOUS,
    Drawn,
    EntryResult,
    RunnerLimits,
    StepEntry,
    StepPlan,
    StepResult,
)
from headrace.simulate.cost import Cost
from headrace.simulate.distribution import Distribution, Vocabulary
from headrace.simulate.slots import Slots, mistaken


@dataclass(slots=True)
class _Submitted:
    number: int
    plan: StepPlan
    tables: list[list[int]]  # as they were at submission: the engine goes on changing its own
    started_s: float
    compute_s: float


class SimulatedRunner:
    """Implements `core.step.Runner`. With `strict` the whole table of each entry is checked."""

    def __init__(
        self,
        limits: RunnerLimits,
        *,
        cost: Cost,
        clock: VirtualClock,
        vocab_size: int = 1000,
        eos_id: int | None = None,
        eos_rate: float = 0.0,
        strict: bool = False,
    ) -> None:
        if eos_id is not None and not 0 <= eos_id < vocab_size > 1:
            raise ConfigError(
                f"eos_id is {eos_id}; expected an id below vocab_size, {vocab_size}, and another "
                "token beside it.",
                "Choose another eos_id, or leave it out.",
                param="eos_id",
            )
        self.limits = limits
        self.steps = 0  # submitted so far
        self.progress = 0  # steps done
        self._cost = cost
        self._clock = clock
        self._vocabulary = Vocabulary(vocab_size, eos_id, eos_rate)
        self._strict = strict
        self._slots = Slots(limits.total_blocks, limits.block_tokens)
        self._in_flight: deque[_Submitted] = deque()
        self._busy_until_s = clock.now_s()
        self._drawn: dict[int, int] = {}  # by the step before
        # Sequences that failed -> plans submitted by then: those that follow are not yet told.
        self._lost: dict[int, int] = {}
        self._failing: set[int] = set()
        self._raising: set[int] = set()

    def fail(self, sequence_ids: Iterable[int]) -> None:
        """From the next collected step on, these sequences fail, each alone."""
        self._failing.update(sequence_ids)

    def raise_on_step(self, number: int) -> None:
        """Collecting the plan with this number (the first submitted is 0) raises."""
        self._raising.add(number)

    def submit(self, plan: StepPlan) -> None:
        if len(self._in_flight) >= self.limits.steps_in_flight:
            raise mistaken(
                f"{len(self._in_flight)} plans before it that were not collected",
                f"fewer than {self.limits.steps_in_flight}",
            )
        _check_plan(plan, self.limits, self._vocabulary.size, self._strict)
        submitted = _Submitted(
            number=self.steps,
            plan=plan,
            tables=[list(entry.block_table) for entry in plan.entries],
            started_s=self._clock.now_s(),
            compute_s=self._cost(plan),
        )
        self.steps += 1
        self._in_flight.append(submitted)

    def collect(self) -> StepResult:
        if not self._in_flight:
            raise HeadraceError(
                "collect() was called with no plan submitted; expected a submit() before it.",
                "Submit a plan first.",
            )
        submitted = self._in_flight.popleft()
        self.progress += 1
        # One step at a time: it began when it was submitted, or when the step before it was done.
        self._busy_until_s = max(self._busy_until_s, submitted.started_s) + submitted.compute_s
        self._clock.advance(max(0.0, self._busy_until_s - self._clock.now_s()))
        if submitted.number in self._raising:
            self._drawn = {}
            self._lost.update((entry.sequence_id, self.steps) for entry in submitted.plan.entries)
            raise HeadraceError(
                f"Step {submitted.number} failed, as raise_on_step() asked.",
                "Ask for no failure.",
            )
        results = self._execute(submitted)
        if all(map(_is_plain, results, submitted.plan.entries)):  # said in few words, as a GPU does
            drawn = Drawn(
                [result.sequence_id for result in results],
                [result.token_id for result in results if result.token_id is not None],
                [result.logprob for result in results],
            )
            return StepResult(drawn=drawn, compute_s=submitted.compute_s)
        return StepResult(entries=results, compute_s=submitted.compute_s)

    def close(self) -> None:
        """Nothing is held."""

    def _execute(self, submitted: _Submitted) -> list[EntryResult]:
        plan, tables = submitted.plan, submitted.tables
        for source, target in plan.copies:
            self._slots.copy(source, target)
        self._check_writers(plan.entries, tables)
        drawn: dict[int, int] = {}
        results = []
        for entry, table in zip(plan.entries, tables, strict=True):
            if submitted.number < self._lost.get(entry.sequence_id, 0):
                error = "the step before failed"
                result = EntryResult(sequence_id=entry.sequence_id, error=error)
            else:
                result = self._compute(entry, table)
            if result.error is not None:
                self._lost[entry.sequence_id] = self.steps
                self._slots.spoil(table, entry.start, len(entry.token_ids))
            elif result.token_id is not None:
                drawn[entry.sequence_id] = result.token_id
            results.append(result)
        self._drawn = drawn
        return results

    def _compute(self, entry: StepEntry, table: list[int]) -> EntryResult:
        sequence_id, token_ids = entry.sequence_id, entry.token_ids
        result = EntryResult(sequence_id=sequence_id)
        if token_ids[0] == PREVIOUS:
            if sequence_id not in self._drawn:
                raise mistaken(
                    f"PREVIOUS for sequence {sequence_id}, which drew nothing in the step before",
                    "a token id",
                )
            token_ids = [self._drawn[sequence_id]]
        if sequence_id in self._failing:
            result.error = "made to fail"
            return result
        if self._strict:
            self._slots.check_chain(table, entry.start)
        hashes = self._slots.write(table, entry.start, token_ids)
        if entry.targets is not None:
            scored = [Distribution(value, self._vocabulary) for value in hashes]
            pairs = zip(scored, entry.targets, strict=True)
            result.target_logprobs = [after.logprob(target) for after, target in pairs]
            result.target_top = [after.top(entry.top_logprobs) for after in scored]
        if entry.pool:
            result.pooled = [
                float(sum(value >> 16 * place & 0xFFFF for value in hashes)) for place in range(4)
            ]
        if entry.draw is not None:
            after = Distribution(hashes[-1], self._vocabulary)
            token = after.draw(entry.draw)
            if token is None:
                result.error = "no token is left to draw: all are banned or masked"
                result.is_own_fault = True
                return result
            result.token_id = token
            result.logprob = after.logprob(token)
            if entry.top_logprobs:
                result.top = after.top(entry.top_logprobs)
        return result

    def _check_writers(self, entries: list[StepEntry], tables: list[list[int]]) -> None:
        """No block is written by two sequences; strict: no slot is read that another one writes."""
        size = self.limits.block_tokens
        writers: dict[int, tuple[int, int]] = {}  # block -> sequence, first place written
        for entry, table in zip(entries, tables, strict=True):
            first, place = divmod(entry.start, size)
            last = (entry.start + len(entry.token_ids) - 1) // size
            for block in table[first : last + 1]:
                if block in writers:
                    raise mistaken(
                        f"block {block} written by sequences {writers[block][0]} and "
                        f"{entry.sequence_id}",
                        "one writer a block",
                    )
                writers[block] = (entry.sequence_id, place)
                place = 0
        if self._strict:
            for entry, table in zip(entries, tables, strict=True):
                _check_readers(entry, table, writers, size)


def _check_readers(
    entry: StepEntry, table: list[int], writers: dict[int, tuple[int, int]], size: int
) -> None:
    for index, block in enumerate(table[: -(-entry.start // size)]):
        writer, place = writers.get(block, (entry.sequence_id, size))
        if writer != entry.sequence_id and place < entry.start - index * size:
            raise mistaken(
                f"block {block} read by sequence {entry.sequence_id} while {writer} writes it",
                "positions before `start` to be in the blocks before the step",
            )


def _check_plan(plan: StepPlan, limits: RunnerLimits, vocab_size: int, strict: bool) -> None:
    if not 0 < plan.batch_tokens <= limits.max_batch_tokens:
        raise mistaken(f"{plan.batch_tokens} tokens", f"1 to {limits.max_batch_tokens}")
    if len(plan.entries) > limits.max_sequences:
        raise mistaken(f"{len(plan.entries)} entries", f"at most {limits.max_sequences}")
    if len({entry.sequence_id for entry in plan.entries}) != len(plan.entries):
        raise mistaken("a sequence in more than one entry", "one entry a sequence")
    for pair in plan.copies:
        if not all(0 <= block < limits.total_blocks for block in pair):
            raise mistaken(f"the copy {pair}", f"blocks 0 to {limits.total_blocks - 1}")
    for entry in plan.entries:
        _check_entry(entry, limits, vocab_size, strict)


def _check_entry(entry: StepEntry, limits: RunnerLimits, vocab_size: int, strict: bool) -> None:
    who = f"sequence {entry.sequence_id}"
    token_ids, table = entry.token_ids, entry.block_table
    end = entry.start + len(token_ids)
    if not token_ids or entry.start < 0 or end > limits.context_tokens:
        raise mistaken(
            f"{who} with {len(token_ids)} tokens from position {entry.start}",
            f"at least one, within the context of {limits.context_tokens}",
        )
    if len(table) * limits.block_tokens < end:
        raise mistaken(
            f"{who} with {len(table)} blocks of {limits.block_tokens} tokens",
            f"enough for {end} tokens",
        )
    # Without `strict` only the blocks that will be touched: long tables are most of the cost.
    used = table if strict else table[max(0, entry.start - 1) // limits.block_tokens :]
    if min(used) < 0 or max(used) >= limits.total_blocks or len(set(used)) != len(used):
        raise mistaken(f"{who} with blocks {table}", f"0 to {limits.total_blocks - 1}, each once")
    if entry.targets is not None and len(entry.targets) != len(token_ids):
        raise mistaken(f"{who} with {len(entry.targets)} targets", f"{len(token_ids)}")
    previous = limits.steps_in_flight > 1 and token_ids == [PREVIOUS]
    for token in [*token_ids, *(entry.targets or ())]:
        if not 0 <= token < vocab_size and not (previous and token == PREVIOUS):
            raise mistaken(
                f"{who} with a token {token}",
                f"0 to {vocab_size - 1}, or PREVIOUS alone with plans in flight",
            )


def _is_plain(result: EntryResult, entry: StepEntry) -> bool:
    """Whether a token was drawn, and that is all that was asked for."""
    asked = entry.targets is not None or entry.top_logprobs > 0 or entry.pool
    return result.token_id is not None and result.error is None and not asked
