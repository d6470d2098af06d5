"""A Runner over the reference ops: computes a plan when it is submitted, or, with more than one
step in flight, when it is collected, so that results lag as those of a device do.

Logits are computed only for rows that a plan asks about, some rows at a time. Checks a plan before
touching any block, so that a mistaken plan leaves all sequences as they were.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from headrace.backends.reference.ops import KvBlocks, ReferenceOps, ReferenceWeight, prepare
from headrace.backends.reference.sampling import (
    draw,
    log_probability,
    top_log_probabilities,
)
from headrace.core.errors import ConfigError, HeadraceError, InvalidRequestError
from headrace.core.step import (
    PREVIOUS,
    EntryResult,
    RunnerLimits,
    StepEntry,
    StepPlan,
    StepResult,
)
from headrace.models.decoder import DecoderWeights, hidden_states, logits
from headrace.models.spec import ModelSpec
from headrace.weights.weight import Weight

_LOGIT_VALUES = 1 << 22  # in memory at a time: 16 MiB


class ReferenceRunner:
    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights[Weight],
        *,
        total_blocks: int,
        block_tokens: int = 16,
        max_batch_tokens: int = 512,
        max_sequences: int = 64,
        context_tokens: int | None = None,
        steps_in_flight: int = 1,
    ) -> None:
        self.spec = spec
        self._limits = RunnerLimits(
            max_batch_tokens=max_batch_tokens,
            max_sequences=max_sequences,
            total_blocks=total_blocks,
            block_tokens=block_tokens,
            context_tokens=spec.context_tokens if context_tokens is None else context_tokens,
            steps_in_flight=steps_in_flight,
            counts_previous=True,
        )
        _check_limits(self._limits, spec)
        self._weights = _prepare_all(weights)
        self._blocks = KvBlocks(spec, total_blocks, block_tokens)
        self._flight: deque[StepPlan | StepResult] = deque()
        # By the last step, by sequence: the token, or None if it should have drawn one and failed.
        self._drawn: dict[int, int | None] = {}
        self._progress = 0

    @property
    def limits(self) -> RunnerLimits:
        return self._limits

    @property
    def progress(self) -> int:
        return self._progress

    def _advance(self) -> None:
        self._progress += 1

    def submit(self, plan: StepPlan) -> None:
        _check_plan(plan, self._limits, self.spec.vocab_size)
        if len(self._flight) >= self._limits.steps_in_flight:
            raise HeadraceError(
                f"A plan was submitted with {len(self._flight)} in flight; expected fewer than "
                f"{self._limits.steps_in_flight}.",
                "Collect one first.",
            )
        if self._limits.steps_in_flight == 1:
            self._flight.append(self._run(plan))
            return
        # Read now: whoever wrote the plan may go on with its lists.
        entries = [
            replace(
                e,
                token_ids=list(e.token_ids),
                block_table=list(e.block_table),
                draw=None if e.draw is None else replace(e.draw, history=list(e.draw.history)),
            )
            for e in plan.entries
        ]
        self._flight.append(StepPlan(entries=entries, copies=list(plan.copies)))

    def collect(self) -> StepResult:
        if not self._flight:
            raise HeadraceError(
                "collect() was called with no plan submitted; expected a submit() before it.",
                "Submit a plan first.",
            )
        oldest = self._flight.popleft()
        return oldest if isinstance(oldest, StepResult) else self._run(oldest)

    def close(self) -> None:
        """Nothing to let go of."""

    def logits(self, plan: StepPlan) -> list[NDArray[np.float32]]:
        """For tests: compute the plan, and give all logits of each entry: [tokens, vocab]"""
        _check_plan(plan, self._limits, self.spec.vocab_size)
        plan, _ = _continued(plan, self._drawn)
        self._blocks.copy(plan.copies)
        ops = ReferenceOps(self._blocks, plan.entries)
        x = hidden_states(ops, self.spec, self._weights)
        rows = logits(ops, self.spec, self._weights, x)
        ends = np.cumsum([len(entry.token_ids) for entry in plan.entries])
        return np.split(rows, ends[:-1])

    def _run(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        results = [EntryResult(sequence_id=entry.sequence_id) for entry in plan.entries]
        previous = self._drawn
        self._drawn = {e.sequence_id: None for e in plan.entries if e.draw is not None}
        plan, failed = _continued(plan, previous)
        self._blocks.copy(plan.copies)
        sample_s = self._compute(plan, results) if plan.entries else 0.0
        for index in failed:
            results[index] = EntryResult(
                sequence_id=results[index].sequence_id,
                error="the step before, which this one continues, failed",
            )
        self._drawn = {r.sequence_id: r.token_id for r in results if r.sequence_id in self._drawn}
        return StepResult(entries=results, compute_s=time.perf_counter() - began, sample_s=sample_s)

    def _compute(self, plan: StepPlan, results: list[EntryResult]) -> float:
        """Fills in the results; what drawing took, in seconds."""
        sample_s = 0.0
        ops = ReferenceOps(self._blocks, plan.entries, self._advance)
        x = hidden_states(ops, self.spec, self._weights)
        if any(entry.pool for entry in plan.entries):
            _pool(plan, results, ops.norm(x, self._weights.final_norm, self.spec.norm_eps))
        wanted = list(_wanted_rows(plan))
        some = max(1, _LOGIT_VALUES // self.spec.vocab_size)
        for at in range(0, len(wanted), some):
            chunk = wanted[at : at + some]
            ops.wanted = [row for row, _, _ in chunk]
            found = logits(ops, self.spec, self._weights, x)
            began = time.perf_counter()
            for values, (_, index, token) in zip(found, chunk, strict=True):
                _answer(plan.entries[index], results[index], values, token)
            sample_s += time.perf_counter() - began
        return sample_s


def _continued(plan: StepPlan, previous: dict[int, int | None]) -> tuple[StepPlan, list[int]]:
    """The plan with the tokens that the step before drew, and the entries whose sequence failed in
    it. Those are computed from token 0: nobody else can see their blocks."""
    entries: list[StepEntry] = []
    failed: list[int] = []
    for index, entry in enumerate(plan.entries):
        if entry.token_ids == [PREVIOUS]:
            if entry.sequence_id not in previous:
                raise _mistaken(
                    f"PREVIOUS for sequence {entry.sequence_id}",
                    "a token id, as the step before drew none for it",
                )
            token = previous[entry.sequence_id]
            if token is None:
                failed.append(index)
            draw = entry.draw
            if draw is not None:
                draw = replace(draw, history=[*draw.history, token or 0])
            entry = replace(entry, token_ids=[token or 0], draw=draw)
        entries.append(entry)
    return StepPlan(entries=entries, copies=plan.copies), failed


def _wanted_rows(plan: StepPlan) -> Iterator[tuple[int, int, int]]:
    """(row of the step, its entry, its place in the entry) for each row whose logits matter."""
    row = 0
    for index, entry in enumerate(plan.entries):
        last = len(entry.token_ids) - 1
        for token in range(len(entry.token_ids)):
            if entry.targets is not None or (entry.draw is not None and token == last):
                yield row + token, index, token
        row += len(entry.token_ids)


def _pool(plan: StepPlan, results: list[EntryResult], rows: NDArray[np.float32]) -> None:
    """Each entry's sum over its rows of normed hidden states, where it wants one."""
    end = 0
    for entry, result in zip(plan.entries, results, strict=True):
        first, end = end, end + len(entry.token_ids)
        if entry.pool:
            result.pooled = rows[first:end].sum(axis=0, dtype=np.float64).tolist()


def _answer(entry: StepEntry, result: EntryResult, values: NDArray[np.float32], token: int) -> None:
    try:
        if entry.targets is not None:
            logprob = log_probability(values, entry.targets[token])
            result.target_logprobs = [*result.target_logprobs, logprob]
            if entry.top_logprobs:
                top = top_log_probabilities(values, entry.top_logprobs)
                result.target_top = [*result.target_top, top]
        if entry.draw is not None and token == len(entry.token_ids) - 1:
            result.token_id, result.logprob = draw(values, entry.draw)
            if entry.top_logprobs:
                result.top = top_log_probabilities(values, entry.top_logprobs)
    except HeadraceError as error:  # of this row: the other sequences go on
        result.error, result.is_own_fault = error.cause, isinstance(error, InvalidRequestError)


def _prepare_all(weights: DecoderWeights[Weight]) -> DecoderWeights[ReferenceWeight]:
    """Each weight in float32, a tied head sharing the embedding's array."""
    tied = weights.head.parts == weights.embed.parts
    embed = prepare(weights.embed)

    def change(role: str, weight: Weight) -> ReferenceWeight:
        return embed if role == "embed" or (role == "head" and tied) else prepare(weight)

    return weights.map(change)


def _check_limits(limits: RunnerLimits, spec: ModelSpec) -> None:
    names = ("max_batch_tokens", "max_sequences", "total_blocks", "block_tokens", "steps_in_flight")
    for name in names:
        if getattr(limits, name) < 1:
            raise ConfigError(
                f"{name} is {getattr(limits, name)}; expected 1 or more.",
                f"Use {name} 1 or more.",
                param=name,
            )
    if not 1 <= limits.context_tokens <= spec.context_tokens:
        raise ConfigError(
            f"context_tokens is {limits.context_tokens}; the model was described for 1 to "
            f"{spec.context_tokens}.",
            f"Set context_tokens to {spec.context_tokens} or less.",
            param="context_tokens",
        )


def _check_plan(plan: StepPlan, limits: RunnerLimits, vocab_size: int) -> None:
    if plan.batch_tokens > limits.max_batch_tokens:
        raise _mistaken(f"{plan.batch_tokens} tokens", f"at most {limits.max_batch_tokens}")
    if len(plan.entries) > limits.max_sequences:
        raise _mistaken(f"{len(plan.entries)} entries", f"at most {limits.max_sequences}")
    if len({entry.sequence_id for entry in plan.entries}) != len(plan.entries):
        raise _mistaken("a sequence in more than one entry", "one entry a sequence")
    for pair in plan.copies:
        if not all(0 <= block < limits.total_blocks for block in pair):
            raise _mistaken(f"a copy of blocks {pair}", f"0 to {limits.total_blocks - 1}")
    for entry in plan.entries:
        _check_entry(entry, limits, vocab_size)


def _check_entry(entry: StepEntry, limits: RunnerLimits, vocab_size: int) -> None:
    who = f"sequence {entry.sequence_id}"
    end = entry.start + len(entry.token_ids)
    if not entry.token_ids or entry.start < 0 or end > limits.context_tokens:
        raise _mistaken(
            f"{who} with {len(entry.token_ids)} tokens from position {entry.start}",
            f"at least one, within the context of {limits.context_tokens}",
        )
    if len(entry.block_table) * limits.block_tokens < end:
        raise _mistaken(
            f"{who} with {len(entry.block_table)} blocks of {limits.block_tokens} tokens",
            f"enough for {end} tokens",
        )
    if not all(0 <= block < limits.total_blocks for block in entry.block_table):
        raise _mistaken(f"{who} with blocks {entry.block_table}", f"0 to {limits.total_blocks - 1}")
    token_ids = entry.token_ids
    targets = entry.targets if entry.targets is not None else []
    if entry.targets is not None and len(targets) != len(entry.token_ids):
        raise _mistaken(f"{who} with {len(targets)} targets", f"{len(entry.token_ids)}")
    if PREVIOUS in token_ids:
        if limits.steps_in_flight == 1:
            raise _mistaken(f"PREVIOUS for {who}", "token ids, as only one step is in flight")
        if len(token_ids) != 1:
            raise _mistaken(
                f"PREVIOUS among {len(token_ids)} tokens of {who}", "it as the only one"
            )
        token_ids = []
    if not all(0 <= token < vocab_size for token in [*token_ids, *targets]):
        raise _mistaken(f"{who} with a token outside the vocabulary", f"0 to {vocab_size - 1}")
    if not 0 <= entry.top_logprobs <= vocab_size:
        raise _mistaken(f"{who} with {entry.top_logprobs} top_logprobs", f"0 to {vocab_size}")
    if entry.draw is not None:
        how = entry.draw
        named = chain(how.bias, how.allowed or (), how.banned, how.history)
        if not all(0 <= token < vocab_size for token in named):
            raise _mistaken(
                f"{who} with a draw that names a token outside the vocabulary",
                f"0 to {vocab_size - 1}",
            )


def _mistaken(found: str, expected: str) -> HeadraceError:
    return HeadraceError(
        f"The step plan has {found}; expected {expected}.",
        "This is a mistake in Headrace: please report it.",
    )
