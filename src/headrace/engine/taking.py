"""What became of a row: tokens are given out, sequences end, siblings are forked.

The scheduler's loop over a step's rows appends the tokens of plain sequences itself; here is what
the others need (several tokens, alternatives, beams, grammars, embeddings, failures), and how a
sequence or a whole request ends. Knows sequences and results; plans nothing.
"""

from __future__ import annotations

import logging

from headrace.core.errors import InvalidRequestError
from headrace.core.request import FinishReason, SampledToken
from headrace.core.step import RowResult, StepPlan, StepResult, TopLogprobs
from headrace.engine.admission import Admission
from headrace.engine.beam import BeamGroup
from headrace.engine.constrained import fork_constraints, reason_of
from headrace.engine.drafting import Drafting
from headrace.engine.embedding import add_pooled
from headrace.engine.prefix import PrefixCache
from headrace.engine.roster import Roster
from headrace.engine.sequence import Rare, Sequence, child_seed
from headrace.engine.stats import EngineStats

log = logging.getLogger(__name__)

_NO_RESULT = RowResult()


class Taking:
    def __init__(
        self,
        roster: Roster,
        admission: Admission,
        prefix: PrefixCache | None,
        stats: EngineStats,
        drafting: Drafting | None,
    ) -> None:
        self._roster = roster
        self._requests, self._undecided = roster.requests, roster.undecided
        self._admission = admission
        self._prefix = prefix  # None: finished sequences are not kept
        self._stats = stats
        self._drafting = drafting
        self.progress = 0  # grows while results are taken, which grammars may make slow

    # -- rows ----------------------------------------------------------------------------------

    def take_rare(
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
        if row in plan.drafts:
            return self._take_drafted(sequence, row, plan, result, given, is_kept)
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

    def _take_drafted(
        self,
        sequence: Sequence,
        row: int,
        plan: StepPlan,
        result: StepResult,
        given: list[SampledToken],
        is_kept: bool,
    ) -> int:
        """Take the row of a sequence with guesses: the tokens of the places that it has reached.
        Returns how many these are."""
        assert self._drafting is not None
        tokens, found = result.tokens[row], result.extras.get(row, _NO_RESULT)
        right, wrong = self._drafting.judge(sequence, tokens)
        if sequence.constraint is None:
            sequence.draws_in_flight -= 1
        if is_kept:  # what was computed after the last right guess does not count
            end = plan.starts[row] + plan.counts[row] - wrong
            sequence.computed_tokens = sequence.scheduled_tokens = end
        taken = tokens[: right + 1]
        for at, token_id in enumerate(taken):
            token = SampledToken(
                sequence.request.request_id,
                token_id,
                result.logprobs[row][at],
                sequence.index,
                found.tops[at] if found.tops else (),
            )
            if at == 0:
                token.drafted = right, wrong
            if at < right:  # a right guess ends nothing, and its grammar has allowed it
                sequence.token_ids.append(token_id)
                given.append(token)
            else:
                self._take_last(sequence, taken, token, given)
        if len(taken) == right:  # the place after the last right guess failed
            given += self._fail_row(sequence, found)
        return len(taken)

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
        self._take_last(sequence, [token_id], token, given)

    def _take_last(
        self,
        sequence: Sequence,
        taken: list[int],
        token: SampledToken,
        given: list[SampledToken],
    ) -> None:
        """Take the last of the tokens that a sequence without beams drew in a step."""
        rare = sequence.rare
        if rare is None:
            self.give(sequence, token, sequence.append(token.token_id), given)
        elif rare.constraint is None:
            self._give_rare(sequence, token, sequence.append(token.token_id), given)
        else:
            try:
                rare.constraint.accept(*taken)
                if self._drafting is not None:
                    self._drafting.look_ahead(rare.constraint)
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
        self.give(sequence, token, reason, given)

    def give(
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

    def _take_pooled(
        self, sequence: Sequence, start: int, sums: list[float] | None
    ) -> list[SampledToken]:
        token = add_pooled(sequence, start, sums)
        if token is None:
            return []
        self._finish(sequence, FinishReason.STOP)
        return [token]

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

    # -- grammars ------------------------------------------------------------------------------

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

    # -- ends ----------------------------------------------------------------------------------

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

    def end_one(self, request_id: str, index: int, reason: FinishReason) -> None:
        """End one continuation of a request, if it has begun. Creates no event."""
        for sequence in list(self._requests.get(request_id, [])):
            if sequence.index == index and sequence.beams is None and not sequence.siblings:
                self._count_finish(reason)
                self._admission.learn(sequence.generated_tokens)
                self._roster.drop(sequence)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if self._prefix is not None:
            self._prefix.publish_full(sequence)
        self._count_finish(reason)
        self._roster.drop(sequence)

    def _count_finish(self, reason: FinishReason) -> None:
        self._stats.finished[reason] = self._stats.finished.get(reason, 0) + 1
