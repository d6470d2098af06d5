"""The unit of a search's work: one simulated run of a replica or a fleet, or a proof that a rate
holds. Named at the top of a module and made of plain values, so that other processes can do it.
Knows no search.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.search.candidate import Candidate
from headrace.search.question import Question
from headrace.search.replica import Recipe
from headrace.search.trial import Trial, run_trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run; the same job always gives the same trial."""

    candidate: Candidate
    recipe: Recipe
    rate: float  # of one replica
    seed: int
    slowness: float
    lateness: float
    requests: int
    replicas: int = 1  # then rate and requests are those of all together


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Runs of one candidate at one rate at the slow end: the first, and if that held, one with
    another seed."""

    trials: tuple[Trial, ...]

    @property
    def holds(self) -> bool:
        return all(trial.holds for trial in self.trials)


def run_job(question: Question, job: Job) -> Trial:
    return run_trial(
        job.recipe.setup(),
        question.workload,
        question.slo,
        rate=job.rate,
        seed=job.seed,
        requests=job.requests,
        slowness=job.slowness,
        lateness=job.lateness,
        replicas=job.replicas,
    )


def prove(question: Question, job: Job) -> Proof:
    first = run_job(question, job)
    if not first.holds:
        return Proof(trials=(first,))
    return Proof(trials=(first, run_job(question, replace(job, seed=job.seed + 1))))
