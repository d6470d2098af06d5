"""The machine that `headrace calibrate` measured, as one more candidate beside rented GPUs.

Its step times are the profile's, and so are its pool, its sizes of a step and what serving adds;
nothing about it is taken from a data sheet. Other candidates are another builder's. Knows profiles;
measures nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from headrace.core.step import StepPlan
from headrace.hardware.profile import Profile
from headrace.hardware.this_machine import NAME
from headrace.search.answer import Loss, Why
from headrace.search.candidate import Candidate
from headrace.search.question import Question
from headrace.search.replica import Builder, Built, ErrorBand
from headrace.search.steady import Batch, StepTime
from headrace.simulate.curve import Curve
from headrace.simulate.profiled import setup_of
from headrace.simulate.replica import UNBOUNDED, Setup

LEAST_ERROR = 0.05  # of step times: machines drift by more than one calibration shows


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRecipe:
    profile: Profile
    slowness: float

    def setup(self) -> Setup:
        found, slowness = setup_of(self.profile), self.slowness
        cost = found.cost

        def slowed(plan: StepPlan) -> float:
            return slowness * cost(plan)

        return replace(found, cost=slowed, queue=UNBOUNDED)


class Calibrated:
    """A builder of the measured machine's one candidate, and of another builder's."""

    def __init__(
        self,
        profile: Profile,
        others: Builder,
        question: Question,
        *,
        model: str,
        precision: str,
        usd_per_hour: float | None,
    ) -> None:
        limits = profile.limits
        backend = profile.model.get("backend")
        kv_dtype = backend.get("kv_dtype") if isinstance(backend, dict) else None
        self._profile, self._others, self._question = profile, others, question
        self._usd = usd_per_hour
        self.measured = Candidate(
            model=model,
            gpu=NAME,
            tp=1,
            precision=precision,
            kv_dtype=str(kv_dtype or "f16"),
            max_sequences=limits.max_sequences,
            batch_tokens=limits.max_batch_tokens,
        )

    def candidates(self) -> Sequence[Candidate]:
        return [self.measured, *self._others.candidates()]

    def refuse(self, candidate: Candidate) -> Loss | None:
        if candidate.gpu != NAME:
            return self._others.refuse(candidate)
        if candidate != self.measured:
            return Loss(
                candidate=candidate, why=Why.TYPE, text="the profile was measured otherwise"
            )
        limits, longest = self._profile.limits, self._question.lengths.longest_tokens
        held = min(limits.context_tokens, limits.total_blocks * limits.block_tokens)
        if longest <= held:
            return None
        text = f"a request of {longest:,} tokens; it was measured with room for {held:,}"
        return Loss(candidate=candidate, why=Why.MEMORY, text=text, least=longest / held)

    def build(self, candidate: Candidate, slowness: float) -> Built:
        if candidate.gpu != NAME:
            return self._others.build(candidate, slowness)
        recipe = ProfileRecipe(profile=self._profile, slowness=slowness)
        setup, lengths = recipe.setup(), self._question.lengths
        step_s = _batch_time(
            Curve(self._profile.steps, self._profile.limits.padded_tokens), slowness
        )
        prompt = lengths.prompt_at_least(self._question.slo.share)
        edge = setup.edge
        way_s = edge.before_s + edge.busy_s + edge.after_s
        way_s += prompt * (edge.before_token_s + edge.busy_token_s)
        alone = Batch(decodes=1.0, decode_context_tokens=lengths.decode_context_tokens)
        limits = setup.limits
        return Built(
            recipe=recipe,
            step_s=step_s,
            kv_tokens=limits.total_blocks * limits.block_tokens,
            alone_ttft_s=way_s + _prompt_s(setup, prompt),
            alone_tpot_s=step_s(alone),
            spreads_prompts=True,
        )

    def band(self, candidate: Candidate) -> ErrorBand:
        """Twice the spread of the measured steps, which is half of what lies between quartiles."""
        if candidate.gpu != NAME:
            return self._others.band(candidate)
        error = max(LEAST_ERROR, 2 * median(step.spread for step in self._profile.steps))
        return ErrorBand(
            fast=max(0.5, 1 - error),
            slow=1 + error,
            source=f"the spread of its profile, measured on {self._profile.date[:10]}",
            whose=NAME,
        )

    def plain_precision(self, model: str) -> str:
        return self._others.plain_precision(model)

    def plain_kv_dtype(self, model: str) -> str:
        return self._others.plain_kv_dtype(model)

    def usd_per_gpu_hour(self, candidate: Candidate) -> float | None:
        return self._usd if candidate.gpu == NAME else self._others.usd_per_gpu_hour(candidate)


def _batch_time(curve: Curve, slowness: float) -> StepTime:
    """Without what serving adds: a bound must not be too low."""

    def step_s(batch: Batch) -> float:
        return slowness * curve.seconds(
            decode_rows=batch.decodes,
            context_tokens=batch.decode_context_tokens,
            prompt_tokens=batch.prefill_tokens,
            attended_tokens=batch.prefill_context_tokens,
        )

    return step_s


def _prompt_s(setup: Setup, prompt_tokens: int) -> float:
    """A prompt alone, in chunks."""
    total_s, start = 0.0, 0
    while start < prompt_tokens:
        count = min(setup.limits.max_batch_tokens, prompt_tokens - start)
        plan = StepPlan()
        plan.add(0, [0] * count, start, [])
        total_s += setup.cost(plan)
        start += count
    return total_s
