"""A Runner over the reference ops: computes a plan at once when it is submitted.

Logits are computed only for rows that a plan asks about, some rows at a time. Checks a plan before
touching any block, so that a mistaken plan leaves all sequences as they were.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from headrace.backends.reference.ops import KvBlocks, ReferenceOps, ReferenceWeight, prepare
from headrace.backends.reference.sampling import (
    draw,
    log_probability,
    top_log_probabilities,
)
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.step import EntryResult, RunnerLimits, StepEntry, StepPlan, StepResult
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
    ) -> None:
        self.spec = spec
        self._limits = RunnerLimits(
            max_batch_tokens=max_batch_tokens,
            max_sequences=max_sequences,
            total_blocks=total_blocks,
            block_tokens=block_tokens,
            context_tokens=spec.context_tokens if context_tokens is None else context_tokens,
        )
        _check_limits(self._limits, spec)
        self._weights = _prepare_all(weights)
        self._blocks = KvBlocks(spec, total_blocks, block_tokens)
        self._results: deque[StepResult] = deque()

    @property
    def limits(self) -> RunnerLimits:
        return self._limits

    def submit(self, plan: StepPlan) -> None:
        began = time.perf_counter()
        _check_plan(plan, self._limits, self.spec.vocab_size)
        results = [EntryResult(sequence_id=entry.sequence_id) for entry in plan.entries]
        if plan.entries:
            self._compute(plan, results)
        compute_s = time.perf_counter() - began
        self._results.append(StepResult(entries=results, compute_s=compute_s))

    def collect(self) -> StepResult:
        if not self._results:
            raise HeadraceError(
                "collect() was called with no plan submitted; expected a submit() before it.",
                "Submit a plan first.",
            )
        return self._results.popleft()

    def logits(self, plan: StepPlan) -> list[NDArray[np.float32]]:
        """For tests: compute the plan, and give all logits of each entry: [tokens, vocab]"""
        _check_plan(plan, self._limits, self.spec.vocab_size)
        ops = ReferenceOps(self._blocks, plan.entries)
        x = hidden_states(ops, self.spec, self._weights)
        rows = logits(ops, self.spec, self._weights, x)
        ends = np.cumsum([len(entry.token_ids) for entry in plan.entries])
        return np.split(rows, ends[:-1])

    def _compute(self, plan: StepPlan, results: list[EntryResult]) -> None:
        ops = ReferenceOps(self._blocks, plan.entries)
        x = hidden_states(ops, self.spec, self._weights)
        wanted = list(_wanted_rows(plan))
        some = max(1, _LOGIT_VALUES // self.spec.vocab_size)
        for at in range(0, len(wanted), some):
            chunk = wanted[at : at + some]
            ops.wanted = [row for row, _, _ in chunk]
            found = logits(ops, self.spec, self._weights, x)
            for values, (_, index, token) in zip(found, chunk, strict=True):
                _answer(plan.entries[index], results[index], values, token)


def _wanted_rows(plan: StepPlan) -> Iterator[tuple[int, int, int]]:
    """(row of the step, its entry, its place in the entry) for each row whose logits matter."""
    row = 0
    for index, entry in enumerate(plan.entries):
        last = len(entry.token_ids) - 1
        for token in range(len(entry.token_ids)):
            if entry.targets is not None or (entry.draw is not None and token == last):
                yield row + token, index, token
        row += len(entry.token_ids)


def _answer(entry: StepEntry, result: EntryResult, values: NDArray[np.float32], token: int) -> None:
    try:
        if entry.targets is not None:
            result.target_logprobs.append(log_probability(values, entry.targets[token]))
            if entry.top_logprobs:
                result.target_top.append(top_log_probabilities(values, entry.top_logprobs))
        if entry.draw is not None and token == len(entry.token_ids) - 1:
            result.token_id, result.logprob = draw(values, entry.draw)
            if entry.top_logprobs:
                result.top = top_log_probabilities(values, entry.top_logprobs)
    except HeadraceError as error:  # of this row: the other sequences go on
        result.error = error.cause


def _prepare_all(weights: DecoderWeights[Weight]) -> DecoderWeights[ReferenceWeight]:
    """Each weight in float32, a tied head sharing the embedding's array."""
    tied = weights.head.parts == weights.embed.parts
    embed = prepare(weights.embed)

    def change(role: str, weight: Weight) -> ReferenceWeight:
        return embed if role == "embed" or (role == "head" and tied) else prepare(weight)

    return weights.map(change)


def _check_limits(limits: RunnerLimits, spec: ModelSpec) -> None:
    for name in ("max_batch_tokens", "max_sequences", "total_blocks", "block_tokens"):
        if getattr(limits, name) < 1:
            raise ConfigError(
                f"{name} is {getattr(limits, name)}; expected 1 or more.",
                f"Set {name} accordingly.",
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
    targets = entry.targets if entry.targets is not None else []
    if entry.targets is not None and len(targets) != len(entry.token_ids):
        raise _mistaken(f"{who} with {len(targets)} targets", f"{len(entry.token_ids)}")
    if not all(0 <= token < vocab_size for token in [*entry.token_ids, *targets]):
        raise _mistaken(f"{who} with a token outside the vocabulary", f"0 to {vocab_size - 1}")
    if not 0 <= entry.top_logprobs <= vocab_size:
        raise _mistaken(f"{who} with {entry.top_logprobs} top_logprobs", f"0 to {vocab_size}")
    if entry.draw is not None:
        how = entry.draw
        named = chain(how.bias, how.allowed or (), how.banned, how.seen, how.counts)
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
