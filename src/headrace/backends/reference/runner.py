"""A Runner over the reference ops: computes a plan when it is submitted, or, with more than one
step in flight, when it is collected, so that results come late as they do from a device.

Computes logits only for rows that a plan asks about, some rows at a time. Checks a plan before
changing any block, so that a wrong plan leaves all sequences as they were.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headrace.backends.reference.ops import (
    KvBlocks,
    ReferenceOps,
    ReferenceWeight,
    Share,
    prepare,
)
from headrace.backends.reference.sampling import (
    draw,
    log_probability,
    top_log_probabilities,
)
from headrace.backends.shared.flight import (
    Continued,
    Flight,
    fail_rows,
    failed_rows,
    tokens_before,
)
from headrace.backends.shared.places import place_extras
from headrace.backends.shared.plan_check import check_blocks, check_draws, check_plan
from headrace.core.errors import ConfigError, HeadraceError, InvalidRequestError
from headrace.core.ranks import Ranks
from headrace.core.step import (
    NO_EXTRA,
    Contents,
    RowExtra,
    RowResult,
    RunnerLimits,
    StepPlan,
    StepResult,
)
from headrace.models.decoder import DecoderWeights, hidden_states, logits
from headrace.models.sharding import vocab_spans
from headrace.models.spec import ModelSpec
from headrace.weights.weight import Weight, are_tied

_LOGIT_VALUES = 1 << 22  # in memory at a time: 16 MiB


@dataclass(slots=True)
class _Step:
    plan: StepPlan
    continued: Continued
    result: StepResult | None = None  # once it is computed


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
        ranks: Ranks | None = None,
    ) -> None:
        """With `ranks`, `spec` and `weights` are this rank's share."""
        self.spec = spec
        self._limits = RunnerLimits(
            max_batch_tokens=max_batch_tokens,
            max_sequences=max_sequences,
            total_blocks=total_blocks,
            block_tokens=block_tokens,
            context_tokens=spec.context_tokens if context_tokens is None else context_tokens,
            steps_in_flight=steps_in_flight,
            counts_previous=True,
            draws_drafts=True,
        )
        _check_limits(self._limits, spec)
        self._share = None
        if ranks is not None:
            self._share = Share(ranks=ranks, vocab=vocab_spans(spec.vocab_size, ranks.count))
        self._weights = _prepare_all(weights)
        self._blocks = KvBlocks(spec, total_blocks, block_tokens)
        self._flight: Flight[_Step] = Flight(self._limits, spec.vocab_size)
        self._before: StepResult | None = None  # of the previous step; None if that failed
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
        step = self._read(plan)
        if self._limits.steps_in_flight == 1:
            step.result = self._run(step)
        self._flight.add(plan, step)

    def collect(self) -> StepResult:
        step = self._flight.take()
        return self._run(step) if step.result is None else step.result

    def _read(self, plan: StepPlan) -> _Step:
        """A copy that does not change with the lists that the plan's author shares."""
        continued = self._flight.check(plan)
        check_blocks(plan, self._limits)
        check_draws(plan, self.spec.vocab_size)
        extras = {
            row: replace(extra, history=list(extra.history)) for row, extra in plan.extras.items()
        }
        tables = [list(table) for table in plan.tables]
        copy = replace(plan, token_ids=list(plan.token_ids), tables=tables, extras=extras)
        return _Step(copy, continued)

    @property
    def block_bytes(self) -> int:
        return self._blocks.block_bytes

    @property
    def block_layout(self) -> str:
        return self._blocks.layout

    def read_blocks(self, blocks: Sequence[int]) -> list[memoryview]:
        return [self._blocks.content(block) for block in blocks]

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[Contents]) -> None:
        for block, content in zip(blocks, contents, strict=True):
            self._blocks.put(block, content)

    def close(self) -> None:
        """Nothing to release."""

    def logits(self, plan: StepPlan) -> list[NDArray[np.float32]]:
        """For tests: compute a plan without PREVIOUS, and return all logits of each row: [tokens,
        vocab]"""
        check_plan(plan, self._limits, self.spec.vocab_size)
        self._blocks.copy(plan.copies)
        ops = ReferenceOps(self._blocks, plan, share=self._share)
        x = hidden_states(ops, self.spec, self._weights)
        if not self.spec.has_head:
            return []
        rows = logits(ops, self.spec, self._weights, x)
        return np.split(rows, np.cumsum(plan.counts)[:-1])

    def _fill_in(self, step: _Step) -> list[int]:
        """Fill in tokens that the previous step drew. Returns the rows whose token failed."""
        plan, before = step.plan, self._before
        tokens = tokens_before(step.continued, before)
        for row, (at, token) in zip(step.continued.rows, tokens, strict=True):
            plan.token_ids[at] = token
            if (extra := plan.extras.get(row)) is not None:
                extra.history = [*extra.history, token]
        return failed_rows(step.continued, before)

    def _run(self, step: _Step) -> StepResult:
        began = time.perf_counter()
        failed = self._fill_in(step)
        self._before = None  # if this step raises
        plan = step.plan
        self._blocks.copy(plan.copies)
        result = StepResult(tokens=[[] for _ in plan.counts], logprobs=[[] for _ in plan.counts])
        result.extras = {row: RowResult() for row in plan.extras}
        if len(plan):
            self._compute(plan, result)
        if self._share is not None and self._limits.steps_in_flight > 1:
            result.tokens = self._share.ranks.share(result.tokens)  # the next plan may continue
        fail_rows(result, failed)
        result.compute_s = time.perf_counter() - began
        self._before = result
        return result

    def _compute(self, plan: StepPlan, result: StepResult) -> None:
        """Fills in the result."""
        ops = ReferenceOps(self._blocks, plan, self._advance, self._share)
        x = hidden_states(ops, self.spec, self._weights)
        if not self.spec.has_head:
            return
        if any(extra.pool for extra in plan.extras.values()):
            assert self._weights.final_norm is not None
            _pool(plan, result, ops.norm(x, self._weights.final_norm, self.spec.norm_eps))
        wanted = list(_wanted_rows(plan))
        places = place_extras(plan)
        some = max(1, _LOGIT_VALUES // self.spec.vocab_size)
        for at in range(0, len(wanted), some):
            chunk = wanted[at : at + some]
            ops.wanted = [at for at, _, _ in chunk]
            found = logits(ops, self.spec, self._weights, x)
            if self._share is not None and self._share.ranks.rank:
                continue  # the first rank draws
            began = time.perf_counter()
            for values, (_, row, token) in zip(found, chunk, strict=True):
                _answer(plan, result, values, row, token, places.get(row))
            result.sample_s += time.perf_counter() - began


def _wanted_rows(plan: StepPlan) -> Iterator[tuple[int, int, int]]:
    """(index in the step, row of the plan, index in that row) of each token whose logits are
    needed."""
    first = 0
    for row, count in enumerate(plan.counts):
        targets = plan.extras.get(row, NO_EXTRA).targets
        for token in range(count):
            if targets is not None or (
                plan.draws[row] is not None and token >= _first_place(plan, row)
            ):
                yield first + token, row, token
        first += count


def _first_place(plan: StepPlan, row: int) -> int:
    """The index in a row of its last known token: those behind it are drafts."""
    return plan.counts[row] - 1 - len(plan.drafts.get(row, ()))


def _pool(plan: StepPlan, result: StepResult, hidden: NDArray[np.float32]) -> None:
    """For rows that ask for it: the sum of normed hidden states over the row's tokens."""
    parts = np.split(hidden, np.cumsum(plan.counts)[:-1])
    for row, extra in plan.extras.items():
        if extra.pool:
            result.extras[row].pooled = parts[row].sum(axis=0, dtype=np.float64).tolist()


def _answer(
    plan: StepPlan,
    result: StepResult,
    values: NDArray[np.float32],
    row: int,
    token: int,
    places: list[RowExtra] | None,
) -> None:
    """What the logits after a row's token say. `places` are the extras of its draws, if it has
    drafts and any."""
    asked, params = plan.extras.get(row, NO_EXTRA), plan.draws[row]
    found = result.extras.get(row, RowResult())
    place = token - _first_place(plan, row)
    if found.error is not None and row in plan.drafts:
        return  # a place behind one that failed
    try:
        top = top_log_probabilities(values, asked.top_logprobs) if asked.top_logprobs else []
        if asked.targets is not None:
            logprob = log_probability(values, asked.targets[token])
            found.target_logprobs = [*found.target_logprobs, logprob]
            found.target_tops = [*found.target_tops, top] if asked.top_logprobs else []
        if params is not None and place >= 0:
            uniform = plan.uniforms[row] if place == 0 else plan.drafts[row].uniforms[place - 1]
            extra = asked if places is None else places[place]
            drawn, logprob = draw(values, params, uniform, extra)
            result.tokens[row].append(drawn)
            result.logprobs[row].append(logprob)
            found.tops = [*found.tops, top] if asked.top_logprobs else []
    except HeadraceError as error:  # fails this row only, or the place if it has drafts
        if row not in plan.drafts:
            result.tokens[row], result.logprobs[row] = [], []
        found.error, found.is_own_fault = error.cause, isinstance(error, InvalidRequestError)
        result.extras[row] = found


def _prepare_all(weights: DecoderWeights[Weight]) -> DecoderWeights[ReferenceWeight]:
    """Each weight in float32; a tied head shares the embedding's array."""
    embed = None if weights.embed is None else prepare(weights.embed)
    tied = embed if are_tied(weights.embed, weights.head) else None

    def change(role: str, weight: Weight) -> ReferenceWeight:
        if role == "embed" and embed is not None:
            return embed
        return tied if role == "head" and tied is not None else prepare(weight)

    return weights.map(change)


def _check_limits(limits: RunnerLimits, spec: ModelSpec) -> None:
    names = ("max_batch_tokens", "max_sequences", "total_blocks", "block_tokens", "steps_in_flight")
    for name in names:
        if getattr(limits, name) < 1:
            raise ConfigError(
                f"{name} is {getattr(limits, name)}; expected 1 or more.",
                f"Set {name} to 1 or more.",
                param=name,
            )
    if not 1 <= limits.context_tokens <= spec.context_tokens:
        raise ConfigError(
            f"context_tokens is {limits.context_tokens}; the model was described for 1 to "
            f"{spec.context_tokens}.",
            f"Set context_tokens to {spec.context_tokens} or less.",
            param="context_tokens",
        )
