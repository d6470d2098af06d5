"""The highest rate that a replica holds under an objective, for several candidates at once.

From the steady state's estimate outwards, until the rate lies between one that held and one that
did not. A run of every candidate in each round, so that two processes have work. Knows no GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.search.candidate import Candidate
from headrace.search.jobs import Job, run_job
from headrace.search.pool import Pool
from headrace.search.question import Question
from headrace.search.replica import Builder, Built
from headrace.search.steady import Limits, Steady, StepTime, about_requests
from headrace.search.trial import Trial, requests_for

WIDTH = 1.08  # how narrow a capacity is looked for
MOST_RUNS = 5  # of one capacity


@dataclass(slots=True, kw_only=True)
class Capacity:
    """Holds at `low`, does not at `high`; `held` is the run at `low`."""

    candidate: Candidate
    about: Steady | None  # None: serves nothing, not even alone
    low: float = 0.0
    high: float = math.inf
    held: Trial | None = None
    runs: int = 0

    @property
    def is_open(self) -> bool:
        if self.about is None:
            return False
        return self.runs < MOST_RUNS and self.high > max(self.low, 1e-9) * WIDTH

    @property
    def next_rate(self) -> float:
        assert self.about is not None
        if self.low == 0.0 and math.isinf(self.high):
            return self.about.requests_s * 0.9
        if math.isinf(self.high):
            return self.low * 1.15
        if self.low == 0.0:
            return self.high * 0.75
        return math.sqrt(self.low * self.high)


def about(
    candidate: Candidate, built: Built, question: Question, step_s: StepTime | None = None
) -> Steady | None:
    """The steady state's estimate, with the replica's own step times or with others."""
    limits = Limits(
        sequences=candidate.max_sequences,
        batch_tokens=candidate.batch_tokens,
        kv_tokens=built.kv_tokens,
        tpot_s=question.slo.tpot_s,
    )
    demand = question.lengths.demand(prefix_cache=candidate.prefix_cache)
    return about_requests(demand, limits, step_s or built.step_s)


def capacities(
    candidates: Sequence[Candidate],
    builder: Builder,
    question: Question,
    pool: Pool[Question],
    *,
    slowness: float | None = 1.0,
) -> dict[Candidate, Capacity]:
    """`slowness` None: the slow end of each one's band."""
    found: dict[Candidate, Capacity] = {}
    jobs_of: dict[Candidate, Job] = {}
    for candidate in dict.fromkeys(candidates):
        band = builder.band(candidate)
        slow = band.slow if slowness is None else slowness
        built = builder.build(candidate, slow)
        found[candidate] = Capacity(candidate=candidate, about=about(candidate, built, question))
        jobs_of[candidate] = Job(
            candidate=candidate,
            recipe=built.recipe,
            rate=0.0,
            seed=question.seed,
            slowness=slow,
            lateness=band.first(slow),
            requests=0,
        )
    while rest := [each for each in found.values() if each.is_open]:
        jobs = [_at(jobs_of[each.candidate], each, question) for each in rest]
        for each, trial in zip(rest, pool.map(run_job, jobs), strict=True):
            each.runs += 1
            if not trial.holds:
                each.high = min(each.high, trial.rate)
            elif trial.rate > each.low:
                each.low, each.held = trial.rate, trial
    return found


def _at(job: Job, capacity: Capacity, question: Question) -> Job:
    assert capacity.about is not None
    rate = capacity.next_rate
    answer_s = capacity.about.step_s * question.lengths.output_tokens
    return Job(
        candidate=job.candidate,
        recipe=job.recipe,
        rate=rate,
        seed=job.seed,
        slowness=job.slowness,
        lateness=job.lateness,
        requests=requests_for(rate, answer_s),
    )
