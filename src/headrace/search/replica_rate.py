"""The rate of one replica at an objective, for `headrace cost`: simulated, at the slow end of the
cost model's band, so that the cost is what it is at most.

Tries the settings of the space and takes the best. Knows no prices.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.errors import ConfigError
from headrace.search.candidate import Candidate
from headrace.search.capacity import capacities
from headrace.search.machine import Machines
from headrace.search.pool import Pool
from headrace.search.question import Question


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRate:
    candidate: Candidate
    requests_s: float  # held at the slow end
    broken_at: float  # requests/s at which it was no longer held there
    output_tokens_s: float
    cached_share: float

    @property
    def note(self) -> str:
        one = self.candidate
        return (
            f"simulated: {one.model} on {one.label} holds {self.requests_s:.3g} requests/s, and no "
            f"longer {self.broken_at:.3g}, at the slow end of the cost model's band"
        )


def replica_rate(machines: Machines, question: Question, processes: int = 1) -> ReplicaRate:
    """Of the best candidate in the machines' space; refuses where none serves anything."""
    possible = []
    losses = []
    for candidate in machines.candidates():
        loss = machines.refuse(candidate)
        if loss is None:
            possible.append(candidate)
        else:
            losses.append(loss)
    if not possible:
        nearest = min(losses, key=lambda loss: loss.least)
        raise ConfigError(
            f"{nearest.candidate.model} can't be served on {nearest.candidate.label}: "
            f"{nearest.text}.",
            "Choose more or other GPUs, or another type of weights; `headrace fit` shows why.",
        )
    with Pool(question, processes) as pool:
        found = capacities(possible, machines, question, pool, slowness=None)
    best = max(found.values(), key=lambda each: (each.low, each.candidate.kv_dtype))
    if best.held is None:
        raise ConfigError(
            f"{best.candidate.model} on {best.candidate.label} holds the objective at no rate: "
            "one request alone is too slow.",
            "Loosen --slo, or choose faster GPUs; `headrace plan` shows which.",
        )
    return ReplicaRate(
        candidate=best.candidate,
        requests_s=best.low,
        broken_at=best.high,
        output_tokens_s=best.low * question.lengths.output_tokens,
        cached_share=best.held.cached_share,
    )
