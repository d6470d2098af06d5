"""The speculator: drafts for all sequences of a step, and how many tokens of each to try.

It joins the parts of this package behind the seam in core/speculation.py: texts and what is hoped
for (guessing.py, matching.py), chances (chances.py), times (step_curve.py), the choice by time
(choosing.py). Knows no backend; a draft model is a runner like any other.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.clock import Clock, WallClock
from headrace.core.drafter import Method
from headrace.core.speculation import Draftable, DraftRoom
from headrace.core.step import StepPlan, StepResult
from headrace.speculate.answer_pool import AnswerPool
from headrace.speculate.chances import KindChances
from headrace.speculate.choosing import (
    BEGIN_MARGIN,
    LEAST_GAIN,
    STAY_MARGIN,
    Candidates,
    choose,
    needed_chance,
)
from headrace.speculate.draft import Draft, model_kind
from headrace.speculate.draft_model import DraftModel
from headrace.speculate.guessing import Guessing
from headrace.speculate.matching import draft_agreed, draft_last
from headrace.speculate.step_curve import GUESS_ATTENDS, StepCurve
from headrace.speculate.synthetic import Synthetic

DEFAULT_TOKENS = 16  # most guesses for a sequence in a step
PLAIN_EVERY = 32  # steps with guesses, one without: to measure it
SURE_GAIN = 1.3  # above which that is needed eight times less
LOOK_AGAIN_STEPS = 16  # after which it is asked again whether any guess can pay
# Looking for guesses may take this share of a step's time while none are found: where it takes more
# (many streams, whose steps are short), some steps are left out.
LOOK_SHARE = 0.005
MOST_LEFT_OUT = 4
# Of a prompt, so many tokens before the answer are kept with it: they find its beginning.
LEAD_TOKENS = 8
SMOOTHING = 0.1
Nothing: tuple[int, ...] = ()


class TimedSpeculator:
    def __init__(
        self,
        method: Method,
        *,
        most_tokens: int = DEFAULT_TOKENS,
        model: DraftModel | None = None,
        synthetic: Synthetic | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.method = Method.SUFFIX if method is Method.AUTO else method
        self.most_tokens = most_tokens
        self.model = model
        self._synthetic = synthetic
        self._clock = clock or WallClock()
        self.curve = StepCurve()
        self._chances = KindChances()
        self._pool = AnswerPool()
        self._guessing: dict[int, Guessing] = {}
        self._is_on = False  # whether the last step that could have guesses had some
        self._guessed_steps = 0  # in a row
        self._gain = 1.0  # that the last choice promised
        self._own_s = 0.0  # what `propose` itself takes
        # Whether any guess can pay is asked again after so many steps, if it can not or if it can.
        self._resting = self._trusted = 0
        self._asked_rows = 0  # of the step for which it was asked
        self._left_out = 0  # steps to come in which nothing is looked for
        self._pipelines = False  # whether the engine has two steps in flight
        self._stepped_s = 0.0  # when the last step was committed
        self._host_s = 0.0  # from there to the end of `propose`, which nothing hides

    # -- the seam --------------------------------------------------------------------------------

    def waits(self) -> bool:
        self._pipelines = True
        if self._is_on:
            return True
        self._resting -= 1
        return self._resting < 0

    def propose(
        self, sequences: Sequence[Draftable], most: Sequence[int], room: DraftRoom
    ) -> Sequence[Sequence[int]]:
        began_s = self._clock.now_s()
        guesses: Sequence[Sequence[int]] = [Nothing] * len(sequences)
        if self._left_out:
            self._left_out -= 1
        elif self._may_pay(room) and not self._is_time_for_plain():
            guesses = self._choose(sequences, most, room)
            self._is_on = any(guesses)
            now_s = self._clock.now_s()
            self._own_s += SMOOTHING * (now_s - began_s - self._own_s)
            if not self._is_on and not self._pipelines:
                share = self._own_s / self._step_s(room.rows, room.context_tokens)
                self._left_out = min(MOST_LEFT_OUT, int(share / LOOK_SHARE))
            if self._pipelines:
                # Longer than a step: the engine was idle before.
                host_s = min(now_s - self._stepped_s, self._step_s(room.rows, room.context_tokens))
                self._host_s += SMOOTHING * (host_s - self._host_s)
                self._resting = 0 if self._is_on else LOOK_AGAIN_STEPS
        return guesses

    def taken(self, sequence: Draftable, proposed: int, accepted: int) -> None:
        """Nothing: the next `propose` sees from the tokens what was right."""

    def stepped(self, plan: StepPlan, result: StepResult) -> None:
        self._stepped_s = self._clock.now_s()
        if result.is_warm_up:
            return
        rows, attended = len(plan), float(sum(plan.starts))
        if plan.drafts:
            for row, drafts in plan.drafts.items():
                rows += len(drafts)
                attended += GUESS_ATTENDS * len(drafts) * plan.starts[row]
        if plan.batch_tokens == rows:  # no prompts
            self.curve.learn(rows, attended, result.compute_s)

    def ended(self, sequence: Draftable) -> None:
        self._guessing.pop(sequence.sequence_id, None)
        if self.model is not None:
            self.model.forget(sequence)
        if self._synthetic is not None:
            self._synthetic.keep(sequence)
        elif _method_of(sequence, self.method) is Method.SUFFIX:
            first = max(0, sequence.prompt_tokens - LEAD_TOKENS)
            if len(sequence.token_ids) > sequence.prompt_tokens:
                self._pool.add(sequence.request.cache_salt, sequence.token_ids[first:])

    # -- the decision ----------------------------------------------------------------------------

    def _may_pay(self, room: DraftRoom) -> bool:
        """Whether any guess could pay, however good it were. If none can, nothing is looked up for
        some steps, or until the batch has changed."""
        if self._resting > 0 and not self._pipelines:
            if 3 * abs(room.rows - self._asked_rows) <= self._asked_rows:
                self._resting -= 1
                return False
            self._resting = 0
        if not len(self.curve) or room.most_tokens < 1:
            return False
        if room.rows == self._asked_rows and self._trusted > 0:
            self._trusted -= 1
            return True
        most = min(room.most_tokens, self.most_tokens * room.rows)
        needed = needed_chance(room.rows, room.context_tokens, self._step_s, most)
        self._asked_rows, self._trusted = room.rows, 0
        if needed * (1 + STAY_MARGIN) < 1:
            self._trusted = LOOK_AGAIN_STEPS
            return True
        self._is_on = False
        self._resting = LOOK_AGAIN_STEPS
        return False

    def _choose(
        self, sequences: Sequence[Draftable], most: Sequence[int], room: DraftRoom
    ) -> Sequence[Sequence[int]]:
        gains: list[list[float]] = []
        guessing: list[Guessing | None] = []
        drawn: list[Draftable] = []  # for which the draft model would draft
        for sequence, limit in zip(sequences, most, strict=True):
            method = _method_of(sequence, self.method)
            if method is Method.OFF:
                guessing.append(None)
                gains.append([])
                continue
            found = self._look(sequence, method)
            limit = min(limit, self.most_tokens)
            if method is Method.DRAFT and not found.hoped_tokens:
                drawn.append(sequence)
                kinds = [model_kind(at) for at in range(limit)]
                found.hope_for(Draft([], kinds))
            guessing.append(found)
            gains.append(found.gains(self._chances, limit, LEAST_GAIN))
        if self.model is not None and drawn:
            return self._with_model(self.model, sequences, drawn, guessing, gains, room)
        counts = self._counts(sequences, gains, room, 0.0)
        return [
            each.next_tokens(count) if each is not None and count else Nothing
            for each, count in zip(guessing, counts, strict=True)
        ]

    def _counts(
        self,
        sequences: Sequence[Draftable],
        gains: list[list[float]],
        room: DraftRoom,
        draft_s: float,
    ) -> list[int]:
        step = Candidates(
            rows=room.rows,
            attended=room.context_tokens,
            gains=gains,
            contexts=[len(each.token_ids) for each in sequences],
            most_rows=room.most_tokens,
        )
        margin = STAY_MARGIN if self._is_on else BEGIN_MARGIN
        # A draft model's time is `draft_s` already.
        added_s = self._host_s if self._pipelines else 0.0 if draft_s else self._own_s
        found = choose(step, self._step_s, margin=margin, draft_s=draft_s, added_s=added_s)
        self._gain = found.gain
        return found.counts

    def _is_time_for_plain(self) -> bool:
        """While every step has guesses, nobody sees what a step without them takes. One is planned
        now and then: the more often, the less guesses gain, since a small error then decides."""
        if not self._is_on:
            self._guessed_steps = 0
            return False
        self._guessed_steps += 1
        if self._guessed_steps < (PLAIN_EVERY if self._gain < SURE_GAIN else 8 * PLAIN_EVERY):
            return False
        self._guessed_steps = 0
        return True

    def _look(self, sequence: Draftable, method: Method) -> Guessing:
        """What is hoped for next, looked up if nothing is."""
        found = self._guessing.get(sequence.sequence_id)
        if found is None:
            found = self._guessing[sequence.sequence_id] = Guessing(sequence)
        else:
            found.catch_up(self._chances)
        if forced := sequence.forced:
            found.hope_for_forced(forced, self.most_tokens)
        elif found.hoped_tokens < self.most_tokens // 2 and method is not Method.DRAFT:
            found.hope_for(self._draft(sequence, found, method))
        return found

    def _draft(self, sequence: Draftable, found: Guessing, method: Method) -> Draft:
        if method is Method.SYNTHETIC:
            assert self._synthetic is not None
            return self._synthetic.draft(sequence, self.most_tokens)
        found.text.index()
        if method is Method.NGRAM:
            return draft_last(found.text, self.most_tokens)
        return draft_agreed(
            found.text, self._pool.texts(sequence.request.cache_salt), self.most_tokens
        )

    def _with_model(
        self,
        model: DraftModel,
        sequences: Sequence[Draftable],
        drawn: Sequence[Draftable],
        guessing: list[Guessing | None],
        gains: list[list[float]],
        room: DraftRoom,
    ) -> Sequence[Sequence[int]]:
        ids = {each.sequence_id for each in drawn}
        draft_s = model.draft_s(len(drawn), room.context_tokens)
        counts = self._counts(sequences, gains, room, draft_s)
        wanted = [
            count if each.sequence_id in ids else 0
            for each, count in zip(sequences, counts, strict=True)
        ]
        if not any(wanted):
            self._chances.drift(range(model_kind(0), model_kind(self.most_tokens) + 1))
        model.prepare([each for each, count in zip(sequences, wanted, strict=True) if count])
        drafts = model.draft(sequences, wanted)
        guesses: list[Sequence[int]] = []
        for each, count, want, draft in zip(guessing, counts, wanted, drafts, strict=True):
            if each is not None and want:
                # Empty where the model has not caught up with the sequence yet.
                each.hope_for(Draft(draft, [model_kind(at) for at in range(len(draft))]))
            guesses.append(each.next_tokens(count) if each is not None and count else Nothing)
        return guesses

    def _step_s(self, rows: int, attended: float) -> float:
        return self.curve.step_s(rows, attended) or 1.0


def _method_of(sequence: Draftable, usual: Method) -> Method:
    asked = sequence.request.speculate
    if asked is None:
        return usual
    return Method.SUFFIX if asked is Method.AUTO else asked
