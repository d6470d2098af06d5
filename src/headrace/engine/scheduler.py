"""The scheduler: plans which tokens of which sequences to compute next, and commits the results.

`schedule()` returns a plan, `commit()` takes its result; another plan may be made in between (its
rows then contain tokens that are not known yet). Prefill and decode are not separate modes: each
step computes tokens that a sequence wants and has not computed, first for sequences that are one
token behind (decoding), then for prompts. No arrays, no text, no clock of its own.
"""

from __future__ import annotations

import logging
from collections import deque

from headrace.core.clock import Clock
from headrace.core.config import SchedulerConfig
from headrace.core.constraint import Constraint
from headrace.core.errors import InvalidRequestError
from headrace.core.request import FinishReason, GenerateRequest, SampledToken
from headrace.core.step import (
    PREVIOUS,
    DrawParams,
    RowExtra,
    RowResult,
    RunnerLimits,
    StepPlan,
    StepResult,
    TopLogprobs,
)
from headrace.engine.admission import Admission, check_request
from headrace.engine.beam import BeamGroup
from headrace.engine.blocks import BlockPool
from headrace.engine.constrained import (
    PATIENCE_S,
    check_constraint,
    fork_constraints,
    reason_of,
    start_constraint,
)
from headrace.engine.decoding import add_decoding
from headrace.engine.embedding import add_pooled
from headrace.engine.next_plan import NextPlan
from headrace.engine.pace import Pace
from headrace.engine.policy import StepTimes
from headrace.engine.prefix import PrefixCache
from headrace.engine.room import Room
from headrace.engine.roster import Roster
from headrace.engine.sequence import Rare, Sequence, Status, child_seed, start_sequence
from headrace.engine.starting import Starting
from headrace.engine.stats import EngineStats

log = logging.getLogger(__name__)

_FINISHED = Status.FINISHED  # looked up once, not with every token
_UNKNOWN = [PREVIOUS]
Flight = tuple[list[Sequence], list[int]]  # a plan's sequences, and their epochs when it was made

# 1 / this of a step's tokens may be prompt tokens until their cost beside decoding is known.
FIRST_PROMPT_SHARE = 32


class Scheduler:
    def __init__(
        self,
        limits: RunnerLimits,
        eos_ids: frozenset[int],
        config: SchedulerConfig,
        clock: Clock,
    ) -> None:
        self.limits = limits
        self.config = config
        self.eos_ids = eos_ids
        self.blocks = BlockPool(
            limits.total_blocks, limits.block_tokens, config.remembered_evictions
        )
        self.prefix = PrefixCache(self.blocks)
        self._clock = clock
        self._roster = Roster(self.blocks, config, clock)
        self._waiting, self._running = self._roster.waiting, self._roster.running
        self._undecided = self._roster.undecided
        self.stats = EngineStats(
            self.prefix.stats, self._waiting, self._running, self._roster.turns
        )
        self._requests = self._roster.requests
        self._flights: deque[Flight] = deque()
        first_tokens = max(1, limits.max_batch_tokens // FIRST_PROMPT_SHARE)
        self._times = StepTimes(config.max_step_growth, first_tokens)
        self._pace = Pace(self._roster.turns)
        self._admission = Admission(self.blocks, config.watermark)
        self._starting = Starting(
            limits=limits,
            config=config,
            clock=clock,
            roster=self._roster,
            prefix=self.prefix,
            admission=self._admission,
            compute=self._add_row,
        )
        self._room = Room(self._roster, self.stats, self._starting.heaviest)
        self.started = self._starting.started
        self._next_order = 0
        self.progress = 0  # grows while results are committed, which grammars may make slow

    # -- requests ------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._flights)

    @property
    def running_sequences(self) -> int:
        return len(self._running)

    @property
    def waiting_sequences(self) -> int:
        return len(self._waiting)

    def add(self, request: GenerateRequest, constraint: Constraint | None = None) -> None:
        """Queue a request, or refuse it now. A queued request will run."""
        room = check_request(request, self.limits, self._requests)
        check_constraint(request, constraint)
        beams = None if request.beam is None else BeamGroup(request.beam)
        sequence = start_sequence(
            self._roster.take_id(),
            request,
            order=self._next_order,
            arrival_s=self._clock.now_s(),
            room_tokens=room,
            eos_ids=self.eos_ids,
            beams=beams,
            constraint=constraint,
            counts_previous=self.limits.counts_previous,
        )
        if beams is not None:
            beams.start(sequence)
        start_constraint(sequence)
        self._next_order += 1
        self._roster.enter(sequence)

    def check(self, request: GenerateRequest) -> None:
        """Refuse a request that can never run."""
        check_request(request, self.limits, self._requests)

    def end_one(self, request_id: str, index: int, reason: FinishReason) -> None:
        """End one continuation of a request, if it has begun. Creates no event."""
        for sequence in list(self._requests.get(request_id, [])):
            if sequence.index == index and sequence.beams is None and not sequence.siblings:
                self._count_finish(reason)
                self._admission.learn(sequence.generated_tokens)
                self._roster.drop(sequence)

    def end(
        self, request_id: str, reason: FinishReason, error: str | None = None
    ) -> list[SampledToken]:
        """End a request in any state and free its blocks. Returns one event per continuation."""
        sequences = self._requests.get(request_id, [])
        indexes = sorted(i for s in sequences for i in range(s.index, s.index + 1 + s.siblings))
        if sequences and (beams := sequences[0].beams) is not None:
            indexes = list(range(beams.width))
        for sequence in list(sequences):
            self._roster.drop(sequence)
        for _ in indexes:
            self._count_finish(reason)
        return [
            SampledToken(
                request_id=request_id,
                token_id=-1,
                logprob=0.0,
                index=index,
                finish_reason=reason,
                error=error,
            )
            for index in indexes
        ]

    # -- planning ------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing can be computed now."""
        new = NextPlan(self.limits.max_batch_tokens)
        running = self._pace.choose(self._running.values())
        prompts = add_decoding(running, new, self._room.make)
        decode_tokens = len(new.sequences)
        if decode_tokens:
            waiting = min(len(self._waiting), self._starting.slots - len(self._running))
            new.prompt_budget = self._times.prompt_tokens(
                new.budget, decode_tokens, len(prompts) + waiting
            )
        self._starting.fill(prompts, new)
        if not new.sequences:
            return None
        sequences = list(new.sequences.values())
        self._flights.append((sequences, [sequence.epoch for sequence in sequences]))
        return new.plan

    def _add_row(self, sequence: Sequence, count: int, new: NextPlan) -> None:
        """Put the next `count` tokens of a sequence into the plan, with blocks to hold them."""
        start, known = sequence.scheduled_tokens, len(sequence.token_ids)
        # A token that is not known yet gets its own row, in a later step than the known ones.
        end = min(start + count, known) if start < known else start + 1
        if end > sequence.own_tokens and not self._room.make(sequence, start, end, new):
            return
        draw: DrawParams | None = None
        uniform, extra = 0.0, None
        if end == known + sequence.draws_in_flight and not sequence.request.embed:
            draw = sequence.draws.params
            if draw.temperature:
                uniform = sequence.next_uniform()
            if sequence.brings_extra:
                extra = sequence.next_extra()
            sequence.draws_in_flight += 1
        if sequence.rare is not None and start < sequence.prompt_tokens:
            extra = extra or RowExtra()
            extra.pool = sequence.request.embed
            sequence.ask_scores(start, end, extra)
        token_ids = sequence.token_ids[start:end] if start < known else _UNKNOWN
        new.plan.add(
            sequence.sequence_id,
            token_ids,
            start,
            sequence.blocks,
            sequence.table_version,
            draw,
            uniform,
            extra,
        )
        new.sequences[sequence.sequence_id] = sequence
        new.prompt_budget -= end - start
        sequence.scheduled_tokens = end

    # -- results -------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> list[SampledToken]:
        """Take the result of the oldest plan not yet committed."""
        stats, extras, size = self.stats, result.extras, self.blocks.block_tokens
        given: list[SampledToken] = []
        prompt_tokens = drawn_tokens = 0
        sequences, epochs = self._flights.popleft()
        columns = (epochs, plan.starts, plan.counts, plan.draws, result.tokens, result.logprobs)
        rows = enumerate(zip(sequences, *columns, strict=True))
        for row, (sequence, epoch, start, count, draw, tokens, logprobs) in rows:
            if start < sequence.prompt_tokens:
                prompt_tokens += count
            if sequence.status is _FINISHED:
                continue
            is_kept = epoch == sequence.epoch  # not preempted since the plan was made
            if is_kept:
                sequence.computed_tokens = start + count
            if sequence.rare is not None or (extras and row in extras):
                drawn_tokens += self._take_rare(sequence, row, plan, result, given, is_kept)
            elif draw is not None:
                drawn_tokens += 1
                sequence.draws_in_flight -= 1
                token_id, known = tokens[0], sequence.token_ids
                known.append(token_id)
                # Keywords would take twice the time.
                token = SampledToken(
                    sequence.request.request_id, token_id, logprobs[0], sequence.index
                )
                if token_id in sequence.stop_ids or len(known) >= sequence.full_tokens:
                    self._give(sequence, token, sequence.reason_to_end(token_id), given)
                else:
                    given.append(token)
            if sequence.computed_tokens // size > sequence.published_blocks:
                self._publish_new(sequence)
        self.progress += 1
        if self._undecided:
            given += self.settle(PATIENCE_S)
        decode_tokens = plan.batch_tokens - prompt_tokens
        stats.steps += 1
        stats.prompt_tokens += prompt_tokens
        stats.generated_tokens += drawn_tokens
        stats.step_tokens.observe(prompt_tokens + drawn_tokens)
        stats.compute_s += result.compute_s - result.sample_s
        stats.sample_s += result.sample_s
        self._times.learn(result.compute_s, decode_tokens, prompt_tokens)
        self._pace.learn(result.compute_s, decode_tokens, prompt_tokens)
        return given

    def _take_rare(
        self,
        sequence: Sequence,
        row: int,
        plan: StepPlan,
        result: StepResult,
        given: list[SampledToken],
        is_kept: bool,
    ) -> int:
        """Take the row of a sequence with rare features, or one with more results than a token.
        Returns how many tokens it drew."""
        rare, top, pooled = sequence.rare, None, None
        start, tokens = plan.starts[row], result.tokens[row]
        if rare is not None:
            self.progress += 1
        if plan.draws[row] is not None and (rare is None or rare.constraint is None):
            sequence.draws_in_flight -= 1
        if (found := result.extras.get(row)) is not None:
            if found.error is not None:
                given += self._fail_row(sequence, found)
                return 0
            if found.target_logprobs:
                sequence.keep_scores(start, found)
            top, pooled = found.tops[0] if found.tops else None, found.pooled
        if tokens:
            self._take_token(sequence, tokens[0], result.logprobs[row][0], top, given)
            return 1
        if is_kept and sequence.request.embed:
            given += self._take_pooled(sequence, start, pooled)
        return 0

    def _take_token(
        self,
        sequence: Sequence,
        token_id: int,
        logprob: float,
        top: TopLogprobs | None,
        given: list[SampledToken],
    ) -> None:
        """Take a drawn token. It is given at once, or later if beams or a grammar have to decide
        first."""
        rare = sequence.rare
        if rare is not None and rare.beams is not None:
            given += self._take_beams(rare.beams, sequence, top or ())
            return
        # The prompt's tokens may have asked for more.
        top = top[: sequence.top_logprobs] if top and sequence.top_logprobs else ()
        token = SampledToken(sequence.request.request_id, token_id, logprob, sequence.index, top)
        if rare is None:
            self._give(sequence, token, sequence.append(token_id), given)
        elif rare.constraint is None:
            self._give_rare(sequence, token, sequence.append(token_id), given)
        else:
            try:
                rare.constraint.accept(token_id)
            except Exception as error:  # ends this request only
                given += self._fail_grammar(sequence, error)
            else:
                self._undecided.add(sequence, token)

    def _give_rare(
        self,
        sequence: Sequence,
        token: SampledToken,
        reason: FinishReason | None,
        given: list[SampledToken],
    ) -> None:
        """As `_give`, after what rare features do with a sequence's first token."""
        assert sequence.rare is not None
        if sequence.rare.siblings:
            try:
                self._fork_siblings(sequence, sequence.rare)
            except Exception as error:  # in its grammar
                given += self._fail_grammar(sequence, error)
                return
        token.prompt_scores = sequence.take_scores()
        self._give(sequence, token, reason, given)

    def _give(
        self,
        sequence: Sequence,
        token: SampledToken,
        reason: FinishReason | None,
        given: list[SampledToken],
    ) -> None:
        """Give out a token that was appended to its sequence."""
        given.append(token)
        if reason is not None:
            token.finish_reason = reason
            self._admission.learn(sequence.generated_tokens)
            self._finish(sequence, reason)

    def _take_beams(
        self, beams: BeamGroup, sequence: Sequence, top: TopLogprobs
    ) -> list[SampledToken]:
        tokens = beams.receive(sequence, top, self._roster)
        for token in tokens:
            if token.finish_reason is not None:
                self._count_finish(token.finish_reason)
        if not sequence.is_finished and sequence.wanted_tokens == 0:
            self._roster.park(sequence)
        return tokens

    def _fail_row(self, sequence: Sequence, found: RowResult) -> list[SampledToken]:
        reason = FinishReason.REFUSED if found.is_own_fault else FinishReason.ERROR
        return self.end(sequence.request.request_id, reason, found.error)

    def _publish_new(self, sequence: Sequence) -> None:
        """Add blocks that became full to the prefix cache."""
        full = sequence.computed_tokens // self.blocks.block_tokens
        has_new = full > sequence.published_blocks and not sequence.is_finished
        if has_new and self.config.prefix_cache:
            self.prefix.publish_full(sequence)

    def fail(self, error: str) -> list[SampledToken]:
        """The oldest uncommitted plan could not be computed: end its requests."""
        tokens: list[SampledToken] = []
        for sequence in self._flights.popleft()[0]:
            tokens += self.end(sequence.request.request_id, FinishReason.ERROR, error)
        return tokens

    @property
    def is_undecided(self) -> bool:
        """Whether a drawn token waits for its grammar."""
        return len(self._undecided) > 0

    def settle(self, wait_s: float, *, for_all: bool = False) -> list[SampledToken]:
        """Give out the tokens whose grammar has said what may follow."""
        given: list[SampledToken] = []
        for sequence, token, decided in self._undecided.settle(wait_s, for_all=for_all):
            self.progress += 1
            sequence.draws_in_flight -= 1
            self._roster.resume(sequence)  # if it was preempted meanwhile
            if isinstance(decided, Exception):
                given += self._fail_grammar(sequence, decided)
                continue
            reason = sequence.append(token.token_id, decided)
            self._give_rare(sequence, token, reason, given)
        return given

    def _fail_grammar(self, sequence: Sequence, error: Exception) -> list[SampledToken]:
        log.warning("the grammar of request %s failed: %s", sequence.request.request_id, error)
        is_own_fault = isinstance(error, InvalidRequestError)
        kind = FinishReason.REFUSED if is_own_fault else FinishReason.ERROR
        return self.end(sequence.request.request_id, kind, reason_of(error))

    def _take_pooled(
        self, sequence: Sequence, start: int, sums: list[float] | None
    ) -> list[SampledToken]:
        token = add_pooled(sequence, start, sums)
        if token is None:
            return []
        self._finish(sequence, FinishReason.STOP)
        return [token]

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if self.config.prefix_cache:
            self.prefix.publish_full(sequence)
        self._count_finish(reason)
        self._roster.drop(sequence)

    def _fork_siblings(self, parent: Sequence, rare: Rare) -> None:
        """Start the request's other continuations from the prompt's blocks. Each computes the last
        prompt token again, into a copy of its block, to get its own logits."""
        shared = parent.prompt_tokens - 1
        # Fork all constraints first: if one fails, nothing has changed.
        for index, started in enumerate(fork_constraints(parent), start=1):
            child = self._roster.fork(parent, shared, None if started is None else started[0])
            if started is not None and child.rare is not None:
                child.rare.mask = started[1]
            child.index = index
            child.token_ids = list(parent.request.prompt_token_ids)
            child.seed = child_seed(parent.seed, index)
        rare.siblings = 0
        if rare.unstarted is not None:
            rare.unstarted[0].close()
            rare.unstarted = None

    def _count_finish(self, reason: FinishReason) -> None:
        self.stats.finished[reason] = self.stats.finished.get(reason, 0) + 1

    def check_integrity(self) -> None:
        """free + used + cached == total, and sequences and pool agree on who holds which block."""
        self._roster.check_integrity()
