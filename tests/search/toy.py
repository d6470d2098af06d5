"""A small world to search in: GPUs that are a few numbers, and step times that are one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from headrace.core.step import RunnerLimits, StepPlan
from headrace.search.answer import Loss, Why
from headrace.search.candidate import Candidate
from headrace.search.demand import lengths_of
from headrace.search.question import Question
from headrace.search.replica import Built, ErrorBand
from headrace.search.steady import Batch
from headrace.simulate.replica import UNBOUNDED, Setup
from headrace.workload.arrivals import OpenLoop
from headrace.workload.slo import Slo
from headrace.workload.workload import Synthetic, fixed

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    weights_s: float  # to read the weights once
    token_s: float  # to compute one token
    context_s: float  # to read the KV of one token
    kv_tokens: int
    usd: float | None


CARDS: Mapping[str, Card] = {
    "small": Card(weights_s=0.020, token_s=60e-6, context_s=40e-9, kv_tokens=30_000, usd=1.0),
    "big": Card(weights_s=0.008, token_s=15e-6, context_s=12e-9, kv_tokens=200_000, usd=4.0),
    "tiny": Card(weights_s=0.200, token_s=900e-6, context_s=1e-6, kv_tokens=20_000, usd=0.1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyRecipe:
    card: Card
    candidate: Candidate
    slowness: float

    def length_s(self, rows: float, context: float) -> float:
        card, tp = self.card, self.candidate.tp
        work_s = max(card.weights_s, card.token_s * rows) + card.context_s * context
        return self.slowness * (work_s / tp + 0.001 * (tp > 1))

    def cost(self, plan: StepPlan) -> float:
        tokens = plan.batch_tokens
        return self.length_s(tokens, sum(plan.starts) + tokens)

    def setup(self) -> Setup:
        limits = RunnerLimits(
            max_batch_tokens=self.candidate.batch_tokens,
            max_sequences=self.candidate.max_sequences,
            total_blocks=self.card.kv_tokens * self.candidate.tp // BLOCK_TOKENS,
            block_tokens=BLOCK_TOKENS,
            context_tokens=4096,
        )
        return Setup(limits=limits, cost=self.cost, queue=UNBOUNDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    cards: Mapping[str, Card] = field(default_factory=lambda: CARDS)
    tps: tuple[int, ...] = (1, 2)
    sequences: tuple[int, ...] = (16, 64)
    batch_tokens: tuple[int, ...] = (512, 2048)
    error: ErrorBand = field(default_factory=lambda: ErrorBand(fast=0.9, slow=1.15, source="a toy"))

    def candidates(self) -> Sequence[Candidate]:
        return [
            Candidate(
                model="toy",
                gpu=gpu,
                tp=tp,
                precision="bf16",
                kv_dtype="bf16",
                max_sequences=sequences,
                batch_tokens=tokens,
            )
            for gpu, tp, sequences, tokens in product(
                self.cards, self.tps, self.sequences, self.batch_tokens
            )
        ]

    def refuse(self, candidate: Candidate) -> Loss | None:
        if candidate.gpu == "small" and candidate.tp > 1:
            return Loss(candidate=candidate, why=Why.DIVIDES, text="small cards stand alone")
        return None

    def build(self, candidate: Candidate, slowness: float) -> Built:
        recipe = ToyRecipe(card=self.cards[candidate.gpu], candidate=candidate, slowness=slowness)

        def step_s(batch: Batch) -> float:
            context = batch.decodes * batch.decode_context_tokens
            context += batch.prefill_tokens  # each is read once
            return recipe.length_s(batch.decodes + batch.prefill_tokens, context)

        return Built(
            recipe=recipe,
            step_s=step_s,
            kv_tokens=recipe.card.kv_tokens * candidate.tp,
            alone_ttft_s=recipe.length_s(200, 200),
            alone_tpot_s=recipe.length_s(1, 240),
            spreads_prompts=True,
        )

    def band(self, candidate: Candidate) -> ErrorBand:
        return self.error

    def plain_precision(self, model: str) -> str:
        return "bf16"

    def plain_kv_dtype(self, model: str) -> str:
        return "bf16"

    def usd_per_gpu_hour(self, candidate: Candidate) -> float | None:
        return self.cards[candidate.gpu].usd


WORKLOAD = Synthetic(prompts=fixed(200), outputs=fixed(40), arrivals=OpenLoop(rate_s=1.0))


def question(rate: float, slo: Slo | None = None, **more: object) -> Question:
    return Question(
        workload=WORKLOAD,
        lengths=lengths_of(WORKLOAD, 0),
        rate=rate,
        slo=slo or Slo(ttft_s=0.5, tpot_s=0.05, share=0.95),
        **more,  # type: ignore[arg-type]
    )
