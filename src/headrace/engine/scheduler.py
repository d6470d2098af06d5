"""The scheduler: plans which tokens of which sequences to compute next, and commits the results.

`schedule()` returns a plan, `commit()` takes its result; another plan may be made in between (its
rows then contain tokens that are not known yet). Prefill and decode are not separate modes: each
step computes tokens that a sequence wants and has not computed, first for sequences that are one
token behind (decoding), then for prompts. No arrays, no text, no clock of its own.
"""

from __future__ import annotations

from collections import deque

from headrace.core.block_store import BlockStore
from headrace.core.clock import Clock
from headrace.core.config import SchedulerConfig
from headrace.core.constraint import Constraint
from headrace.core.drafter import check_asked
from headrace.core.errors import ConfigError
from headrace.core.request import FinishReason, GenerateRequest, SampledToken
from headrace.core.speculation import Speculator
from headrace.core.step import (
    PREVIOUS,
    DrawParams,
    MovesBlocks,
    RowExtra,
    RunnerLimits,
    StepPlan,
    StepResult,
)
from headrace.engine.admission import Admission, check_request
from headrace.engine.beam import BeamGroup
from headrace.engine.blocks import BlockPool
from headrace.engine.constrained import PATIENCE_S, check_constraint, start_constraint
from headrace.engine.decoding import add_decoding
from headrace.engine.drafting import Drafting
from headrace.engine.fetching import Adopt, Fetching
from headrace.engine.next_plan import NextPlan
from headrace.engine.pace import Pace
from headrace.engine.policy import StepTimes
from headrace.engine.prefix import PrefixCache
from headrace.engine.room import Room
from headrace.engine.roster import Roster
from headrace.engine.sequence import Sequence, Status, start_sequence
from headrace.engine.starting import Starting
from headrace.engine.stats import EngineStats
from headrace.engine.taking import Taking

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
        speculator: Speculator | None = None,
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
        self._drafting: Drafting | None = None
        if speculator is not None:
            self._drafting = self._start_drafting(speculator)
        self._taking = Taking(
            self._roster,
            self._admission,
            self.prefix if config.prefix_cache else None,
            self.stats,
            self._drafting,
        )
        self._next_order = 0
        self.fetching: Fetching | None = None

    def attach(self, store: BlockStore, runner: MovesBlocks, adopt: Adopt) -> None:
        """Keep blocks in a store, and look there for prefixes that are not in the pool."""
        self.fetching = Fetching(
            store, runner, self.blocks, self.prefix, self._roster, self._clock, adopt
        )

    def _start_drafting(self, speculator: Speculator) -> Drafting:
        if not self.limits.draws_drafts:
            raise ConfigError(
                "This runner draws one token of a sequence in a step; guessing tokens ahead needs "
                "one that draws several.",
                "Switch speculation off.",
                param="speculate",
            )
        drafting = Drafting(
            speculator, self.blocks, self.stats.drafts, self._pace.room_for_guesses, self._clock
        )
        self._roster.on_drop = drafting.ended
        return drafting

    # -- requests ------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._flights)

    @property
    def progress(self) -> int:
        """Grows while results are committed, which grammars may make slow."""
        return self._taking.progress

    @property
    def running_sequences(self) -> int:
        return len(self._running)

    @property
    def waiting_sequences(self) -> int:
        return len(self._waiting)

    def add(self, request: GenerateRequest, constraint: Constraint | None = None) -> None:
        """Queue a request, or refuse it now. A queued request will run."""
        room = self.check(request)
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
        is_held = self.fetching is not None and self.fetching.begin(sequence)
        self._roster.enter(sequence, is_held=is_held)

    def check(self, request: GenerateRequest) -> int:
        """The most tokens that a request may generate. Refuses one that can never run."""
        is_beam_search = request.beam is not None
        check_asked(request.speculate, self.config.speculate, is_beam_search=is_beam_search)
        return check_request(request, self.limits, self._requests)

    def end_one(self, request_id: str, index: int, reason: FinishReason) -> None:
        """End one continuation of a request, if it has begun. Creates no event."""
        self._taking.end_one(request_id, index, reason)

    def end(self, request_id: str, reason: FinishReason) -> list[SampledToken]:
        """End a request in any state and free its blocks. Returns one event per continuation."""
        return self._taking.end(request_id, reason)

    # -- planning ------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing can be computed now."""
        drafting = self._drafting
        if drafting is not None and self._flights and drafting.waits():
            return None
        new = NextPlan(self.limits.max_batch_tokens)
        running = self._pace.choose(self._running.values())
        prompts = add_decoding(running, new, self._room.make)
        decoding = len(new.sequences)
        if decoding:
            if drafting is not None and not self._flights:  # all its tokens are known
                drafting.add(new)
            waiting = min(len(self._waiting), self._starting.slots - len(self._running))
            new.prompt_budget = self._times.prompt_tokens(
                new.budget, decoding, len(prompts) + waiting
            )
        self._starting.fill(prompts, new)
        if not new.sequences:
            return None
        if drafting is not None:
            drafting.planned(new.plan)
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
        stats, size = self.stats, self.blocks.block_tokens
        taking = self._taking
        # Rows that take more than appending a token.
        special = {**result.extras, **plan.drafts} if plan.drafts else result.extras
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
            if sequence.rare is not None or (special and row in special):
                drawn_tokens += taking.take_rare(sequence, row, plan, result, given, is_kept)
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
                    taking.give(sequence, token, sequence.reason_to_end(token_id), given)
                else:
                    given.append(token)
            if sequence.computed_tokens // size > sequence.published_blocks:
                self._publish_new(sequence)
        taking.progress += 1
        if taking.is_undecided:
            given += taking.settle(PATIENCE_S)
        decode_tokens = plan.batch_tokens - prompt_tokens
        decoding = decode_tokens
        if self._drafting is not None:
            decoding -= sum(map(len, plan.drafts.values()))
            self._drafting.committed(plan, result)
        stats.steps += 1
        stats.prompt_tokens += prompt_tokens
        stats.generated_tokens += drawn_tokens
        stats.step_tokens.observe(prompt_tokens + drawn_tokens)
        stats.compute_s += result.compute_s - result.sample_s
        stats.sample_s += result.sample_s
        if not result.is_warm_up:
            self._times.learn(result.compute_s, decoding, prompt_tokens)
            self._pace.learn(result.compute_s, decode_tokens, prompt_tokens)
        return given

    def _publish_new(self, sequence: Sequence) -> None:
        """Add blocks that became full to the prefix cache."""
        full = sequence.computed_tokens // self.blocks.block_tokens
        has_new = full > sequence.published_blocks and not sequence.is_finished
        if has_new and self.config.prefix_cache:
            self.prefix.publish_full(sequence)

    def fail(self, error: str) -> list[SampledToken]:
        """The oldest uncommitted plan could not be computed: end its requests."""
        tokens: list[SampledToken] = []
        if self._drafting is not None:
            self._drafting.failed()
        for sequence in self._flights.popleft()[0]:
            tokens += self._taking.end(sequence.request.request_id, FinishReason.ERROR, error)
        return tokens

    @property
    def is_undecided(self) -> bool:
        """Whether a drawn token waits for its grammar."""
        return self._taking.is_undecided

    def settle(self, wait_s: float, *, for_all: bool = False) -> list[SampledToken]:
        """Give out the tokens whose grammar has said what may follow."""
        return self._taking.settle(wait_s, for_all=for_all)

    def check_integrity(self) -> None:
        """free + used + cached == total, and sequences and pool agree on who holds which block."""
        self._roster.check_integrity()
