"""The search: sifts candidates, sizes the cheapest by simulating them, and measures the leaders.

1. What a builder refuses is out, with its reason: types, divisions, memory, floors (sift.py).
2. The steady state bounds every other candidate's rate, and so its cost; branch.py simulates from
   the cheapest bound up. All counts are sized at the slow end of the cost model's error band, so
   that a plan holds even there.
3. What could be faster for more money is sized too, for the Pareto front.
4. The leaders run at both ends of the band, and the rate that they hold is bracketed.

Everything is decided by results and by the seed, nothing by time: the same question has the same
answer. Knows no GPU and no model: a builder does. `answer` may be called at any time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from headrace.search.answer import Answer, Band, Loss, Row, Tally, Why
from headrace.search.branch import Found, Shape, Sized, branch_and_bound, least_replicas
from headrace.search.candidate import Candidate
from headrace.search.cost import HOURS_A_MONTH
from headrace.search.jobs import Job, Proof, prove, run_job
from headrace.search.pool import Pool
from headrace.search.question import Question
from headrace.search.replica import Builder
from headrace.search.sift import Known, Sift
from headrace.search.trial import Trial, requests_for

BRACKETED = 3  # rows whose highest rate is looked for
FASTER = 3  # shapes beyond the ranking, for the front,
DEARER = 6.0  # which cost at most so many times the cheapest
BRACKET_WIDTH = 1.12
MOST_FLEET = 8  # replicas that are simulated together; a larger fleet at the same load


class Planner:
    def __init__(self, builder: Builder, question: Question, pool: Pool[Question]) -> None:
        self._builder, self._question, self._pool = builder, question, pool
        self._sift = Sift(builder, question)
        self._found: list[Found[Candidate, Proof]] = []
        self._extra: dict[Candidate, list[Trial]] = {}  # further runs of the leaders
        self._brackets: dict[Candidate, tuple[float, float]] = {}
        self._complete = False
        self.fleet: Trial | None = None
        self.tally = Tally()

    def search(self) -> Iterator[str]:
        """Yields what is being done, for a line of progress."""
        yield "sifting"
        self._sift.run()
        shapes = self._sift.shapes()
        priced = [s for s in shapes if self._price(s.variants[0]) is not None]
        unpriced = [s for s in shapes if self._price(s.variants[0]) is None]
        for some in (priced, unpriced):
            if some:
                yield from self._branch(some, keep=self._question.keep)
        ranked = self._ranked()
        if ranked:
            most = min(DEARER * ranked[0].cost, self._most_hourly)
            faster = self._faster(priced or unpriced, most)
            if faster:
                yield from self._branch(faster, keep=len(faster), most_hourly=most)
        yield from self._measure()
        yield from self._bracket()
        yield from self._fleet()
        self._complete = True

    def _price(self, candidate: Candidate) -> float | None:
        return self._builder.usd_per_gpu_hour(candidate)

    # -- sizing --------------------------------------------------------------------------------

    @property
    def _most_hourly(self) -> float:
        return self._question.most_usd_month / HOURS_A_MONTH

    def _branch(
        self, shapes: Sequence[Shape[Candidate]], keep: int, most_hourly: float | None = None
    ) -> Iterator[str]:
        """`most_hourly` counts GPUs where there is no price."""
        question = self._question
        if most_hourly is None:
            is_priced = self._price(shapes[0].variants[0]) is not None
            most_hourly = self._most_hourly if is_priced else math.inf

        def run(jobs: Sequence[tuple[Candidate, float]]) -> list[Proof]:
            proofs = self._pool.map(prove, [self.job(c, rate) for c, rate in jobs])
            self._count([trial for proof in proofs for trial in proof.trials])
            return proofs

        self._found.append(Found())
        for found in branch_and_bound(shapes, question.rate, run, keep=keep, most_cost=most_hourly):
            self._found[-1] = found
            yield f"{self.tally.runs} runs, {self.sized} deployments sized"

    def job(self, candidate: Candidate, rate: float, slowness: float | None = None) -> Job:
        """At the slow end of the band, or elsewhere."""
        known = self._sift.known[candidate]
        slowness = known.band.slow if slowness is None else slowness
        return Job(
            candidate=candidate,
            recipe=self._builder.build(candidate, slowness).recipe,
            rate=rate,
            seed=self._question.seed,
            slowness=slowness,
            lateness=known.band.first(slowness),
            requests=self._requests(known, rate),
        )

    def _requests(self, known: Known, rate: float) -> int:
        """Steps are taken to grow in a line from one sequence to the fullest batch: less than that,
        in truth, so that a run is rather too long."""
        share = min(1.0, rate / known.about.requests_s)
        step_s = known.alone_s + max(0.0, known.about.step_s - known.alone_s) * share
        return requests_for(rate, step_s * self._question.lengths.output_tokens)

    def _count(self, trials: Sequence[Trial]) -> None:
        self.tally.runs += len(trials)
        self.tally.steps += sum(trial.steps for trial in trials)

    @property
    def sized(self) -> int:
        return sum(len(found.sized) for found in self._found)

    def _faster(self, shapes: Sequence[Shape[Candidate]], most: float) -> list[Shape[Candidate]]:
        """Shapes that were not sized and that the estimate puts on the front: dearer, faster."""
        done = {sized.shape.name: sized for found in self._found for sized in found.sized}
        fastest = max(
            (1 / self._step_s(sized.variant, sized.replicas) for sized in done.values()),
            default=0.0,
        )
        picked: list[Shape[Candidate]] = []
        rate = self._question.rate

        def least_cost(shape: Shape[Candidate]) -> float:
            return least_replicas(rate, shape.estimate) * shape.replica_cost

        for shape in sorted(shapes, key=lambda s: (least_cost(s), s.name)):
            if shape.name in done or least_cost(shape) > most:
                continue
            count = least_replicas(rate, shape.estimate)
            speed = 1 / self._step_s(shape.variants[0], count)
            if speed > fastest * 1.1:
                picked.append(shape)
                fastest = speed
        return picked[:FASTER]

    def _step_s(self, candidate: Candidate, replicas: int) -> float:
        """About the mean step at this load: the batch is the share of the fullest one."""
        about = self._sift.known[candidate].about
        share = min(1.0, self._question.rate / replicas / about.requests_s)
        return about.step_s * (0.5 + 0.5 * share)

    # -- leaders -------------------------------------------------------------------------------

    def _ranked(self) -> list[Sized[Candidate, Proof]]:
        """Of every shape once, the cheapest first, those without a price last."""
        best: dict[str, Sized[Candidate, Proof]] = {}
        for found in self._found:
            for sized in found.sized:
                best.setdefault(sized.shape.name, sized)

        def order(sized: Sized[Candidate, Proof]) -> tuple[object, ...]:
            spare = self._sift.known[sized.variant].about.requests_s * sized.replicas
            no_price = self._price(sized.variant) is None
            return (no_price, round(sized.cost, 6), -spare, sized.shape.name)

        return sorted(best.values(), key=order)

    def _measure(self) -> Iterator[str]:
        """Leaders at the fast end, the first of them in the middle too; the slow end is known."""
        ranked = self._ranked()
        yield f"bands of {len(ranked)} deployments"
        jobs = []
        for number, sized in enumerate(ranked):
            fast = self._sift.known[sized.variant].band.fast
            rate = self._question.rate / sized.replicas
            ends = dict.fromkeys((fast, 1.0) if number < BRACKETED else (fast,))
            jobs += [self.job(sized.variant, rate, slowness) for slowness in ends]
        trials = self._pool.map(run_job, jobs)
        self._count(trials)
        for job, trial in zip(jobs, trials, strict=True):
            self._extra.setdefault(job.candidate, []).append(trial)

    def _bracket(self) -> Iterator[str]:
        """Halves, for the first rows, the space in which the highest rate lies: at the slow end
        the highest that holds, at the fast end the lowest that does not."""
        ranked = self._ranked()[:BRACKETED]
        # [candidate, slowness, a rate that holds, one that does not]
        sides: list[tuple[Sized[Candidate, Proof], float, list[float]]] = []
        for sized in ranked:
            known = self._sift.known[sized.variant]
            held = self._question.rate / sized.replicas
            for slowness in (known.band.slow, known.band.fast):
                most = max(known.bound * known.band.slow / slowness, held * BRACKET_WIDTH)
                sides.append((sized, slowness, [held, most]))
        while open_sides := [s for s in sides if s[2][1] > s[2][0] * BRACKET_WIDTH]:
            yield "the highest rate of the first rows"
            jobs = [
                self.job(sized.variant, math.sqrt(low * high), slowness)
                for sized, slowness, (low, high) in open_sides
            ]
            trials = self._pool.map(run_job, jobs)
            self._count(trials)
            for (_, _, limits), trial in zip(open_sides, trials, strict=True):
                limits[0 if trial.holds else 1] = trial.rate
        for (sized, _, slow), (_, _, fast) in zip(sides[::2], sides[1::2], strict=True):
            self._brackets[sized.variant] = (
                slow[0] * sized.replicas,
                max(fast[1], slow[1]) * sized.replicas,
            )

    def _fleet(self) -> Iterator[str]:
        """The first row once more, all its replicas behind a router: until here each one had its
        share of the rate for itself."""
        ranked = self._ranked()
        if not ranked or ranked[0].replicas == 1:
            return
        first = ranked[0]
        yield f"{first.replicas} replicas behind a router"
        count = min(first.replicas, MOST_FLEET)
        rate = self._question.rate / first.replicas
        job = self.job(first.variant, rate)
        whole = replace(job, rate=rate * count, requests=job.requests * count, replicas=count)
        self.fleet = run_job(self._question, whole)
        self._count([self.fleet])

    # -- the answer ----------------------------------------------------------------------------

    def answer(self) -> Answer:
        """What is known so far."""
        rows = [self._row(sized) for sized in self._ranked()]
        self.tally.candidates = self._sift.looked_at
        self.tally.simulated = len({r.candidate for r in rows} | self._extra.keys())
        return Answer(
            rows=tuple(rows),
            losses=(*self._sift.losses, *self._lost()),
            tally=self.tally,
            complete=self._complete,
            fleet=self.fleet,
        )

    def _row(self, sized: Sized[Candidate, Proof]) -> Row:
        candidate, question = sized.variant, self._question
        trials = (*sized.outcome.trials, *self._extra.get(candidate, ()))
        lengths = question.lengths
        return Row(
            candidate=candidate,
            replicas=sized.replicas,
            usd_per_gpu_hour=self._price(candidate),
            measured=self._sift.known[candidate].band.measured,
            requests_s=question.rate,
            tokens_per_request=lengths.prompt_tokens + lengths.output_tokens,
            ttft_p50_s=_band([t.ttft_s.p50 for t in trials if t.ttft_s]),
            ttft_p99_s=_band([t.ttft_s.p99 for t in trials if t.ttft_s]),
            tpot_p50_s=_band([t.tpot_s.p50 for t in trials if t.tpot_s]),
            tpot_p99_s=_band([t.tpot_s.p99 for t in trials if t.tpot_s]),
            holds_to=self._brackets.get(candidate),
            trials=trials,
        )

    def _lost(self) -> list[Loss]:
        """Shapes whose least cost is above what was found, or above the budget."""
        done = {sized.shape.name for found in self._found for sized in found.sized}
        losses = []
        for found in self._found:
            for shape, hourly in found.beaten():
                if shape.name not in done:
                    done.add(shape.name)
                    losses.append(self._beaten(shape, hourly))
            for shape, proof in found.given_up:
                if shape.name not in done:
                    done.add(shape.name)
                    losses.append(_given_up(shape, proof))
        return losses

    def _beaten(self, shape: Shape[Candidate], hourly: float) -> Loss:
        candidate, count = shape.variants[0], round(hourly / shape.replica_cost)
        replicas = f"{count} replica{'' if count == 1 else 's'}"
        limit = f"one serves at most {shape.bound:.3g} requests/s"
        if self._price(candidate) is None:
            text = f"needs at least {replicas} ({limit}): {count * candidate.tp} GPUs"
            return Loss(candidate=candidate, why=Why.COST, text=text, least=hourly)
        text = f"needs at least {replicas} ({limit}): ${hourly * HOURS_A_MONTH:,.0f} a month"
        if hourly * HOURS_A_MONTH > self._question.most_usd_month:
            return Loss(candidate=candidate, why=Why.BUDGET, text=text, least=hourly)
        return Loss(candidate=candidate, why=Why.COST, text=text, least=hourly)


def _given_up(shape: Shape[Candidate], proof: Proof | None) -> Loss:
    text = "no number of replicas that was tried held the objective"
    if proof is not None:
        trial = proof.trials[-1]
        missed = ", ".join(trial.misses) or trial.verdict
        text += f": at {trial.rate:.3g} requests/s a replica, {missed} ({trial.met_share:.0%} met)"
    return Loss(candidate=shape.variants[0], why=Why.RATE, text=text)


def _band(values: Sequence[float]) -> Band:
    if not values:  # answers of one token have no time per token
        return Band(low=0.0, middle=0.0, high=0.0)
    ordered = sorted(values)
    return Band(low=ordered[0], middle=ordered[len(ordered) // 2], high=ordered[-1])
