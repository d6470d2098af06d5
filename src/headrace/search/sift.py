"""Which candidates may win, and how much each can serve at most: the search before any simulation.

A builder's refusals are losses; the steady state bounds the rate of what is left. Candidates that
rent the same become a shape, whose variants are tried in the order of what they promise. Knows no
runs and no ranking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.search.answer import Loss, Why
from headrace.search.branch import Shape, least_replicas
from headrace.search.candidate import Candidate
from headrace.search.question import Question
from headrace.search.replica import Builder, Built, ErrorBand
from headrace.search.steady import Limits, Steady, about_requests, most_requests

BOUND_SLACK = 1.1  # a bound is loosened by this: real step times are only nearly convex


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Of a candidate that may win."""

    candidate: Candidate
    band: ErrorBand
    bound: float  # requests/s of a replica, at the slow end, loosened
    about: Steady
    alone_s: float  # a token of one sequence, at the slow end


class Sift:
    def __init__(self, builder: Builder, question: Question) -> None:
        self._builder, self._question = builder, question
        self.known: dict[Candidate, Known] = {}
        self.losses: list[Loss] = []
        self.looked_at = 0

    def run(self) -> None:
        for candidate in self._builder.candidates():
            self.looked_at += 1
            loss = self._builder.refuse(candidate) or self._bound(candidate)
            if loss is not None:
                self.losses.append(loss)

    def _bound(self, candidate: Candidate) -> Loss | None:
        """The steady state's bound, or why there is none."""
        question, band = self._question, self._builder.band(candidate)
        built = self._builder.build(candidate, band.slow)
        slo = question.slo
        for why, name, alone_s, most_s in (
            (Why.TTFT, "TTFT", built.alone_ttft_s * band.first_slow, slo.ttft_s),
            (Why.TPOT, "TPOT", built.alone_tpot_s, slo.tpot_s),
        ):
            if most_s is not None and alone_s > most_s:
                text = (
                    f"{name} of one request alone is {alone_s * 1e3:,.0f} ms at the slow end of "
                    f"the band; the objective is {most_s * 1e3:,.0f} ms"
                )
                return Loss(candidate=candidate, why=why, text=text, least=alone_s / most_s)
        found = self._steady(candidate, built)
        if found is None:
            text = "not even one request at a time is within the objective"
            return Loss(candidate=candidate, why=Why.RATE, text=text)
        bound, about = found
        self.known[candidate] = Known(
            candidate=candidate,
            band=band,
            bound=bound,
            about=about,
            alone_s=built.alone_tpot_s,
        )
        return None

    def bound_of(self, candidate: Candidate, slowness: float) -> float | None:
        """Requests/s that one replica never exceeds; None: it serves nothing."""
        found = self._steady(candidate, self._builder.build(candidate, slowness))
        return None if found is None else found[0]

    def _steady(self, candidate: Candidate, built: Built) -> tuple[float, Steady] | None:
        limits = Limits(
            sequences=candidate.max_sequences,
            batch_tokens=candidate.batch_tokens,
            kv_tokens=built.kv_tokens,
            tpot_s=self._question.slo.tpot_s,
        )
        demand = self._question.lengths.demand(prefix_cache=candidate.prefix_cache)
        most = most_requests(demand, limits, built.step_s)
        about = about_requests(demand, limits, built.step_s)
        if most is None or about is None:
            return None
        # An engine that computes a prompt as soon as a step has room for it can't be better than
        # whole chunks. One that spreads prompts can, up to the even spread; not with experts, whose
        # steps are cheaper if tokens come together.
        best = about.requests_s
        if built.spreads_prompts:
            best = max(best, most.requests_s)
        return best * BOUND_SLACK, about

    def shapes(self) -> list[Shape[Candidate]]:
        groups: dict[tuple[object, ...], list[Known]] = {}
        for known in self.known.values():
            groups.setdefault(known.candidate.rented, []).append(known)
        shapes = []
        for group in map(_distinct, groups.values()):
            group.sort(key=self._promise)
            first = group[0].candidate
            price = self._builder.usd_per_gpu_hour(first)
            shapes.append(
                Shape(
                    name=" ".join(map(str, first.rented)),
                    variants=tuple(known.candidate for known in group),
                    bounds=tuple(known.bound for known in group),
                    replica_cost=first.tp * (1.0 if price is None else price),
                    estimate=max(known.about.requests_s for known in group),
                )
            )
        return shapes

    def _promise(self, known: Known) -> tuple[object, ...]:
        """Fewest replicas first; of those with as many, KV as the model has it, which loses
        nothing of its quality."""
        candidate, rate = known.candidate, known.about.requests_s
        count = least_replicas(self._question.rate, rate)
        quantized = candidate.kv_dtype != self._builder.plain_kv_dtype(candidate.model)
        return (count, quantized, -rate, candidate)


def _distinct(group: Sequence[Known]) -> list[Known]:
    """Without those that may run more sequences than others of their kind ever would."""
    enough: dict[Candidate, int] = {}
    for known in group:
        if known.about.limit != "sequences":
            kind = replace(known.candidate, max_sequences=0)
            count = known.candidate.max_sequences
            enough[kind] = min(count, enough.get(kind, count))
    return [
        known
        for known in group
        if known.candidate.max_sequences
        <= enough.get(replace(known.candidate, max_sequences=0), known.candidate.max_sequences)
    ]
