"""The engine's loop: schedule, execute, commit. Many requests share one runner and its blocks.

Computed tokens catch up with wanted tokens under the runner's limits; there is no prefill phase.
A sequence is admitted once blocks for the longest it can become are free, so that it never has to
give any back. Knows no text and no arrays.
"""

from __future__ import annotations

from collections import deque

from headrace.core.errors import ContextLengthError, InvalidRequestError
from headrace.core.request import FinishReason, GenerateRequest, SampledToken
from headrace.core.step import EntryResult, Runner, StepEntry, StepPlan
from headrace.engine.blocks import BlockPool
from headrace.engine.sequence import Sequence


class Engine:
    def __init__(self, runner: Runner, eos_ids: frozenset[int]) -> None:
        self._runner = runner
        self._eos_ids = eos_ids
        self._limits = runner.limits
        self.blocks = BlockPool(self._limits.total_blocks, self._limits.block_tokens)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._next_id = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, request: GenerateRequest) -> None:
        """Queue a request, or refuse it now: one that is queued will run."""
        self._waiting.append(self.check(request))
        self._next_id += 1

    def check(self, request: GenerateRequest) -> Sequence:
        """The sequence that a request would be; refuses one that can never run."""
        sequence = Sequence.start(self._next_id, request, self._context(request), self._eos_ids)
        needed = self.blocks.blocks_for(sequence.most_tokens)
        if needed > self.blocks.total_blocks:
            raise ContextLengthError(
                f"The request may grow to {sequence.most_tokens + 1} tokens; the KV pool holds "
                f"{self.blocks.total_blocks * self.blocks.block_tokens}.",
                "Lower max_tokens or shorten the prompt.",
                param="max_tokens",
            )
        return sequence

    def cancel(self, request_id: str) -> None:
        """End a request wherever it is; its blocks are free at once."""
        self._waiting = deque(s for s in self._waiting if s.request.request_id != request_id)
        for sequence in [s for s in self._running if s.request.request_id == request_id]:
            self._end(sequence)

    def step(self) -> list[SampledToken]:
        """One step: the tokens it brought, in the order of their sequences."""
        plan = self._schedule()
        self._runner.submit(plan)
        return self._commit(plan, self._runner.collect().entries)

    def _context(self, request: GenerateRequest) -> int:
        prompt, context = len(request.prompt_token_ids), self._limits.context_tokens
        if prompt == 0:
            raise InvalidRequestError(
                "The prompt is empty: it has 0 tokens; expected at least 1.",
                "Give some text or token ids.",
                param="prompt",
            )
        if prompt >= context:
            raise ContextLengthError(
                f"The prompt has {prompt} tokens; the context holds {context}, of which at least "
                "one is for the answer.",
                f"Shorten the prompt to {context - 1} tokens or fewer.",
                param="prompt",
            )
        return context

    def _schedule(self) -> StepPlan:
        self._admit()
        budget = self._limits.max_batch_tokens
        entries: list[StepEntry] = []
        for sequence in self._running:
            if budget == 0:
                break
            count = min(sequence.wanted_tokens, budget)
            budget -= count
            start = sequence.computed_tokens
            entries.append(
                StepEntry(
                    sequence_id=sequence.sequence_id,
                    token_ids=sequence.token_ids[start : start + count],
                    start=start,
                    block_table=sequence.blocks,
                    draw=sequence.next_draw() if count == sequence.wanted_tokens else None,
                )
            )
        return StepPlan(entries=entries)

    def _admit(self) -> None:
        """In order of arrival; the first that does not fit holds back those behind it."""
        while self._waiting and len(self._running) < self._limits.max_sequences:
            needed = self.blocks.blocks_for(self._waiting[0].most_tokens)
            if needed > self.blocks.free_blocks:
                return
            sequence = self._waiting.popleft()
            sequence.blocks = self.blocks.take(needed)
            self._running.append(sequence)

    def _commit(self, plan: StepPlan, results: list[EntryResult]) -> list[SampledToken]:
        by_id = {sequence.sequence_id: sequence for sequence in self._running}
        tokens: list[SampledToken] = []
        for entry, result in zip(plan.entries, results, strict=True):
            sequence = by_id[entry.sequence_id]
            sequence.computed_tokens += len(entry.token_ids)
            request_id = sequence.request.request_id
            if result.error is not None:
                reason: FinishReason | None = FinishReason.ERROR
                tokens.append(
                    SampledToken(
                        request_id=request_id,
                        token_id=-1,
                        logprob=0.0,
                        finish_reason=reason,
                        error=result.error,
                    )
                )
            elif result.token_id is not None:
                reason = sequence.append(result.token_id)
                tokens.append(
                    SampledToken(
                        request_id=request_id,
                        token_id=result.token_id,
                        logprob=result.logprob,
                        finish_reason=reason,
                    )
                )
            else:
                continue
            if reason is not None:
                self._end(sequence)
        return tokens

    def _end(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self.blocks.give_back(sequence.blocks)
