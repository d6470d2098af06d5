"""A Runner that computes nothing: it keeps a hash of every prefix in the blocks, and moves a clock.

What it draws depends on a sequence's tokens alone, found through block tables as a model would
find them: an engine that mixes up blocks gets other tokens, or an error. A plan is checked when it
is submitted, and executed when it is collected, so that plans in flight are really in flight. Knows
neither the engine's reasons for a plan nor real time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from headrace.backends.shared.flight import (
    CONTINUES_FAILED,
    Continued,
    Flight,
    failed_rows,
    tokens_before,
)
from headrace.backends.shared.places import place_extras
from headrace.backends.shared.plan_check import check_blocks, mistaken
from headrace.core.clock import VirtualClock
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.step import (
    NO_EXTRA,
    Contents,
    RowExtra,
    RowResult,
    RunnerLimits,
    StepPlan,
    StepResult,
)
from headrace.simulate.cost import Cost
from headrace.simulate.distribution import Distribution, Vocabulary
from headrace.simulate.slots import Slots
from headrace.simulate.timeline import Timeline


@dataclass(slots=True)
class _Step:
    number: int
    plan: StepPlan  # with tables of its own: the engine goes on changing its tables
    continued: Continued


class SimulatedRunner:
    """Implements `core.step.Runner`. With `strict` the whole table of each entry is checked. `host`
    and `result` are the host's times, see Timeline."""

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
        host: Cost | None = None,
        result: Cost | None = None,
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
        self._time = Timeline(clock, cost, host=host, result=result)
        self._vocabulary = Vocabulary(vocab_size, eos_id, eos_rate)
        self._strict = strict
        self._slots = Slots(limits.total_blocks, limits.block_tokens)
        self._flight: Flight[_Step] = Flight(limits, vocab_size)
        self._before: StepResult | None = None  # of the previous step; None if that failed
        # Sequences that failed -> plans submitted by then: those that follow are not yet told.
        self._lost: dict[int, int] = {}
        self._failing: set[int] = set()
        self._raising: set[int] = set()

    def fail(self, sequence_ids: Iterable[int]) -> None:
        """Make these sequences fail, each by itself, from the next collected step on."""
        self._failing.update(sequence_ids)

    def raise_on_step(self, number: int) -> None:
        """Collecting the plan with this number (the first submitted is 0) raises."""
        self._raising.add(number)

    def submit(self, plan: StepPlan) -> None:
        continued = self._flight.check(plan)
        if not len(plan):
            raise mistaken("no rows", "1 or more")
        _check_tables(plan, self.limits, self._strict)
        kept = replace(
            plan,
            token_ids=list(plan.token_ids),
            tables=[list(table) for table in plan.tables],
        )
        self._time.begin(plan)
        step = _Step(self.steps, kept, continued)
        self.steps += 1
        self._flight.add(plan, step)

    def collect(self) -> StepResult:
        step = self._flight.take()
        self.progress += 1
        compute_s = self._time.end()
        before, self._before = self._before, None
        if step.number in self._raising:
            self._lost.update(dict.fromkeys(step.plan.sequence_ids, self.steps))
            raise HeadraceError(
                f"Step {step.number} failed, as raise_on_step() asked.",
                "Ask for no failure.",
            )
        self._before = self._execute(step, before, compute_s)
        return self._before

    @property
    def block_bytes(self) -> int:
        return self._slots.block_bytes

    @property
    def block_layout(self) -> str:
        return f"simulated by {self.limits.block_tokens}"

    def read_blocks(self, blocks: Sequence[int]) -> list[memoryview]:
        self._check_untouched(blocks, "read", only_writes=True)
        return [self._slots.content(block) for block in blocks]

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[Contents]) -> None:
        self._check_untouched(blocks, "written", only_writes=False)
        for block, content in zip(blocks, contents, strict=True):
            self._slots.put(block, content)

    def _check_untouched(self, blocks: Sequence[int], what: str, *, only_writes: bool) -> None:
        """No plan in flight writes these blocks or, unless `only_writes`, touches them."""
        size = self.limits.block_tokens
        for step in self._flight:
            rows = zip(step.plan.starts, step.plan.tables, strict=True)
            touched = {b for start, table in rows for b in table[start // size * only_writes :]}
            for pair in step.plan.copies:
                touched.update(pair[only_writes:])
            if not touched.isdisjoint(blocks):
                raise mistaken(
                    f"blocks {sorted(touched.intersection(blocks))} {what} during step "
                    f"{step.number}, which uses them",
                    "blocks that no plan in flight needs",
                )

    def close(self) -> None:
        """Nothing to release."""

    def _execute(self, step: _Step, before: StepResult | None, compute_s: float) -> StepResult:
        plan = step.plan
        for source, target in plan.copies:
            self._slots.copy(source, target)
        self._check_writers(plan)
        failed = set(failed_rows(step.continued, before))
        for at, token in tokens_before(step.continued, before):
            plan.token_ids[at] = token
        result = StepResult(tokens=[], logprobs=[], compute_s=compute_s)
        places = place_extras(plan)
        first = 0
        for row, (sequence_id, count) in enumerate(
            zip(plan.sequence_ids, plan.counts, strict=True)
        ):
            result.tokens.append([])
            result.logprobs.append([])
            tokens, first = plan.token_ids[first : first + count], first + count
            if row in failed or step.number < self._lost.get(sequence_id, 0):
                found: RowResult | None = RowResult(error=CONTINUES_FAILED)
            else:
                found = self._compute(plan, row, tokens, result, places.get(row))
            if found is None:
                continue
            result.extras[row] = found
            if found.error is not None and not result.tokens[row]:
                self._lost[sequence_id] = self.steps
                self._slots.spoil(plan.tables[row], plan.starts[row], count)
        return result

    def _compute(
        self,
        plan: StepPlan,
        row: int,
        token_ids: list[int],
        result: StepResult,
        places: list[RowExtra] | None,
    ) -> RowResult | None:
        """Puts the drawn tokens into the result; returns the row's other results, if any. `places`
        are the extras of its draws, if it has drafts and any."""
        table, start = plan.tables[row], plan.starts[row]
        asked = plan.extras.get(row, NO_EXTRA)
        if plan.sequence_ids[row] in self._failing:
            return RowResult(error="made to fail")
        if self._strict:
            self._slots.check_chain(table, start)
        hashes = self._slots.write(table, start, token_ids)
        found = RowResult()
        if asked.targets is not None:
            scored = [Distribution(value, self._vocabulary) for value in hashes]
            pairs = zip(scored, asked.targets, strict=True)
            found.target_logprobs = [after.logprob(target) for after, target in pairs]
            found.target_tops = [after.top(asked.top_logprobs) for after in scored]
        if asked.pool:
            found.pooled = [
                float(sum(value >> 16 * place & 0xFFFF for value in hashes)) for place in range(4)
            ]
        if plan.draws[row] is not None:
            places = places or [asked] * (1 + len(plan.drafts.get(row, ())))
            self._draw(plan, row, hashes, places, result, found)
        return None if asked is NO_EXTRA and found.error is None else found

    def _draw(
        self,
        plan: StepPlan,
        row: int,
        hashes: list[int],
        places: list[RowExtra],
        result: StepResult,
        found: RowResult,
    ) -> None:
        """A token at each place, up to one at which none is left."""
        params, uniforms = plan.draws[row], [plan.uniforms[row]]
        assert params is not None
        if len(places) > 1:
            uniforms += plan.drafts[row].uniforms
        tops = []
        for value, uniform, extra in zip(hashes[-len(places) :], uniforms, places, strict=True):
            after = Distribution(value, self._vocabulary)
            token = after.draw(params, uniform, extra)
            if token is None:
                found.error = "no token is left to draw: all are banned or masked"
                found.is_own_fault = True
                break
            result.tokens[row].append(token)
            result.logprobs[row].append(after.logprob(token))
            if extra.top_logprobs:
                tops.append(after.top(extra.top_logprobs))
        found.tops = tops

    def _check_writers(self, plan: StepPlan) -> None:
        """No block is written by two sequences; strict: no slot is read that another one writes."""
        size = self.limits.block_tokens
        writers: dict[int, tuple[int, int]] = {}  # block -> sequence, first place written
        rows = list(zip(plan.sequence_ids, plan.starts, plan.counts, plan.tables, strict=True))
        for sequence_id, start, count, table in rows:
            first, place = divmod(start, size)
            for block in table[first : (start + count - 1) // size + 1]:
                if block in writers:
                    raise mistaken(
                        f"block {block} written by sequences {writers[block][0]} and {sequence_id}",
                        "one writer per block",
                    )
                writers[block] = (sequence_id, place)
                place = 0
        if self._strict:
            for sequence_id, start, _, table in rows:
                _check_readers(sequence_id, start, table, writers, size)


def _check_readers(
    sequence_id: int,
    start: int,
    table: list[int],
    writers: dict[int, tuple[int, int]],
    size: int,
) -> None:
    for index, block in enumerate(table[: -(-start // size)]):
        writer, place = writers.get(block, (sequence_id, size))
        if writer != sequence_id and place < start - index * size:
            raise mistaken(
                f"block {block} read by sequence {sequence_id} while {writer} writes it",
                "positions before `start` to be in the blocks before the step",
            )


def _check_tables(plan: StepPlan, limits: RunnerLimits, strict: bool) -> None:
    """Without `strict` only the blocks that will be touched: long tables are most of the cost."""
    if strict:
        check_blocks(plan, limits)
    for sequence_id, start, table in zip(plan.sequence_ids, plan.starts, plan.tables, strict=True):
        used = table if strict else table[max(0, start - 1) // limits.block_tokens :]
        if min(used) < 0 or max(used) >= limits.total_blocks or len(set(used)) != len(used):
            raise mistaken(
                f"sequence {sequence_id} with blocks {table}",
                f"0 to {limits.total_blocks - 1}, each once",
            )
