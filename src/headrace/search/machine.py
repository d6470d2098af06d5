"""Real candidates: public models on rented GPUs, over the ledger and the roofline.

Says which types, parallelisms and GPUs there are, why one can't be, and how long its steps take.
The ledger is `headrace fit`'s and the step times are the roofline's, with the efficiencies and the
error band of an engine. Knows no search and no simulator's run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from headrace.backends.cuda.device import RESERVED_BYTES
from headrace.backends.demands import Setup as MemorySetup
from headrace.backends.demands import demand_on_gpu
from headrace.core.config import SchedulerConfig
from headrace.core.errors import ConfigError
from headrace.core.sizes import show_bytes
from headrace.core.step import RunnerLimits, StepPlan
from headrace.hardware.gpus import Gpu
from headrace.models.precision import find_precision, tp_obstacle
from headrace.plan.fit import Demand, budget_of
from headrace.plan.fit_work import Floors, floors
from headrace.search.answer import Loss, Why
from headrace.search.candidate import Candidate
from headrace.search.models import PlannedModel, formats_of
from headrace.search.question import Question
from headrace.search.replica import Built, ErrorBand
from headrace.search.steady import Batch, StepTime
from headrace.simulate.engines import Profile, engines, profile
from headrace.simulate.replica import UNBOUNDED, Edge, Setup
from headrace.simulate.roofline import StepTimes, peaks_of, roofline_cost, step_times
from headrace.simulate.step_work import Formats, Layout, StepWork, step_work

MEMORY_SHARE = 0.9  # of a GPU that is planned with
_NO_PACE = 1e6  # other engines fill a step with prompts up to its tokens
# Some megabytes of scratch memory depend on a GPU's processors: counted for so many.
_MANY_PROCESSORS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What is searched over."""

    models: tuple[PlannedModel, ...]
    gpus: tuple[Gpu, ...]
    tps: tuple[int, ...] = (1, 2, 4, 8)
    kv_dtypes: tuple[str, ...] = ("bf16", "fp8")
    sequences: tuple[int, ...] = (256, 1024)
    batch_tokens: tuple[int, ...] = (2048, 8192)
    engine: str = "vllm"
    prices: Mapping[str, float]  # USD per GPU and hour by GPU; a GPU that is missing has no price


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineRecipe:
    limits: RunnerLimits
    times: StepTimes
    slowness: float
    config: SchedulerConfig
    edge: Edge

    def setup(self) -> Setup:
        cost, slowness = roofline_cost(self.times), self.slowness

        def slowed(plan: StepPlan) -> float:
            return slowness * cost(plan)

        return Setup(
            limits=self.limits, cost=slowed, config=self.config, edge=self.edge, queue=UNBOUNDED
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """What does not depend on the GPU: of a model in a type, over so many ranks."""

    demand: Demand  # with the largest settings of the search
    fixed_bytes: int  # of a rank, before the first sequence
    each_bytes: int  # of a sequence of the longest request
    held_tokens: int  # of that sequence, in whole blocks
    prompt_bytes: int  # keys and values of the prompt that floors are about
    formats: Formats
    work: StepWork


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What candidates of a shape have in common."""

    sizes: _Sizes
    budget_bytes: int
    times: StepTimes
    profile: Profile
    floors: Floors


class Machines:
    """A builder over real GPUs and models."""

    def __init__(self, space: Space, question: Question) -> None:
        self.space, self.question = space, question
        self._models = {model.name: model for model in space.models}
        self._gpus = {gpu.name: gpu for gpu in space.gpus}
        self._part = lru_cache(maxsize=None)(self._make_part)
        self._sizes = lru_cache(maxsize=None)(self._make_sizes)
        self._all = tuple(self.all_of(space))

    # -- which there are -----------------------------------------------------------------------

    def candidates(self) -> Sequence[Candidate]:
        return self._all

    @staticmethod
    def all_of(space: Space) -> list[Candidate]:
        return [
            Candidate(
                model=model.name,
                gpu=gpu.name,
                tp=tp,
                precision=precision,
                kv_dtype=kv,
                max_sequences=sequences,
                batch_tokens=tokens,
            )
            for model in space.models
            for gpu, tp, precision, kv, sequences, tokens in product(
                space.gpus,
                space.tps,
                model.precisions,
                space.kv_dtypes,
                space.sequences,
                space.batch_tokens,
            )
            if not (precision == "int8" and "fp8" in gpu.flops and "fp8" in model.precisions)
        ]

    def plain_precision(self, model: str) -> str:
        return self._models[model].precision

    def plain_kv_dtype(self, model: str) -> str:
        return self.space.kv_dtypes[0]

    def usd_per_gpu_hour(self, candidate: Candidate) -> float | None:
        return self.space.prices.get(candidate.gpu)

    # -- why one can't be ----------------------------------------------------------------------

    def refuse(self, candidate: Candidate) -> Loss | None:
        gpu, model = self._gpus[candidate.gpu], self._models[candidate.model]
        missing = missing_type(gpu, model, candidate)
        if missing is not None:
            return Loss(candidate=candidate, why=Why.TYPE, text=missing)
        precision = find_precision(model.counted_precision(candidate.precision))
        obstacle = tp_obstacle(model.spec, precision, candidate.tp)
        if obstacle is not None:
            text = f"{candidate.tp} GPUs do not divide {obstacle}"
            return Loss(candidate=candidate, why=Why.DIVIDES, text=text)
        if candidate.tp > 1 and gpu.link_bytes_s is None and gpu.pcie_bytes_s is None:
            text = f"how fast several {gpu.name} exchange data is not known"
            return Loss(candidate=candidate, why=Why.TYPE, text=text)
        return self._memory_loss(candidate) or self._floor_loss(candidate)

    def _memory_loss(self, candidate: Candidate) -> Loss | None:
        part, longest = self.part(candidate), self.question.lengths.longest_tokens
        needed = part.sizes.fixed_bytes + part.sizes.each_bytes
        if needed <= part.budget_bytes:
            return None
        weights = part.sizes.demand.weights.bytes
        text = (
            f"{show_bytes(needed)} a GPU for weights ({show_bytes(weights)}), buffers and one "
            f"request of {longest:,} tokens; {show_bytes(part.budget_bytes)} may be used"
        )
        least = needed / part.budget_bytes
        return Loss(candidate=candidate, why=Why.MEMORY, text=text, least=least)

    def _floor_loss(self, candidate: Candidate) -> Loss | None:
        """What bandwidth and peak rate alone rule out."""
        slo, found = self.question.slo, self.part(candidate).floors
        for why, name, floor_s, most_s in (
            (Why.TTFT, "TTFT", found.ttft_s, slo.ttft_s),
            (Why.TPOT, "TPOT", found.one_tpot_s, slo.tpot_s),
        ):
            if most_s is not None and floor_s > most_s:
                what = f"{found.prompt_tokens:,} prompt tokens" if why is Why.TTFT else "a token"
                text = (
                    f"{name}: {what} takes at least {floor_s * 1e3:,.3g} ms at the peak of "
                    f"{candidate.label}; the objective is {most_s * 1e3:,.3g} ms"
                )
                return Loss(candidate=candidate, why=why, text=text, least=floor_s / most_s)
        return None

    # -- what one is ---------------------------------------------------------------------------

    def part(self, candidate: Candidate) -> _Part:
        return self._part(candidate.shape)

    def _make_sizes(self, model_name: str, tp: int, precision: str, kv_dtype: str) -> _Sizes:
        model, lengths, space = self._models[model_name], self.question.lengths, self.space
        demand = demand_on_gpu(
            model.spec,
            MemorySetup(
                precision=precision,
                kv_dtype=kv_dtype,
                tp=tp,
                max_batch_tokens=max(space.batch_tokens),
                max_sequences=max(space.sequences),
                keeps_windows=space.engine != "headrace",
            ),
            multiprocessors=_MANY_PROCESSORS,
            weights=model.weights if precision == model.precision else None,
        )
        longest, prompt = lengths.longest_tokens, self._prompt_tokens
        formats = formats_of(model, precision, kv_dtype)
        return _Sizes(
            demand=demand,
            fixed_bytes=demand.fixed_bytes(longest),
            each_bytes=demand.each_bytes(longest),
            held_tokens=demand.held_tokens(longest),
            prompt_bytes=demand.sequence_bytes(demand.held_tokens(prompt)),
            formats=formats,
            work=step_work(model.spec, formats, Layout(tp=tp)),
        )

    @property
    def _prompt_tokens(self) -> int:
        return self.question.lengths.prompt_at_least(self.question.slo.share)

    def _make_part(self, shape: tuple[str, str, int, str, str]) -> _Part:
        model_name, gpu_name, tp, precision, kv_dtype = shape
        gpu = self._gpus[gpu_name]
        sizes = self._sizes(model_name, tp, precision, kv_dtype)
        memory = gpu.memory_bytes or gpu.nominal_bytes or 0
        peaks = peaks_of(gpu, sizes.work)
        found = profile(self.space.engine, gpu, sizes.formats)
        return _Part(
            sizes=sizes,
            budget_bytes=budget_of(memory, MEMORY_SHARE, RESERVED_BYTES),
            times=step_times(sizes.work, peaks, found.efficiencies),
            profile=found,
            floors=floors(
                sizes.demand.work,
                bandwidth_bytes_s=peaks.memory_bytes_s,
                flops_s=max(peaks.attention_flops_s, peaks.mlp_flops_s, peaks.expert_flops_s),
                prompt_tokens=self._prompt_tokens,
                context_tokens=self._prompt_tokens,
                concurrency=1,
                sequence_bytes=sizes.prompt_bytes,
            ),
        )

    def kv_tokens(self, candidate: Candidate) -> int:
        """Tokens that the pool holds, in sequences of the longest request."""
        part = self.part(candidate)
        left = part.budget_bytes - part.sizes.fixed_bytes
        return int(left / max(1, part.sizes.each_bytes) * part.sizes.held_tokens)

    def build(self, candidate: Candidate, slowness: float) -> Built:
        part = self.part(candidate)
        block = part.sizes.demand.block_tokens
        kv_tokens = self.kv_tokens(candidate)
        edge = Edge(before_s=part.profile.waits.request_s)
        pace = None if self.space.engine == "headrace" else _NO_PACE
        recipe = RooflineRecipe(
            limits=RunnerLimits(
                max_batch_tokens=candidate.batch_tokens,
                max_sequences=candidate.max_sequences,
                total_blocks=kv_tokens // block,
                block_tokens=block,
                context_tokens=self._models[candidate.model].spec.context_tokens,
            ),
            times=part.times,
            slowness=slowness,
            config=SchedulerConfig(prefix_cache=candidate.prefix_cache, max_step_growth=pace),
            edge=edge,
        )
        lengths = self.question.lengths
        step_s = batch_time(part.times, lengths.prompt_tokens, slowness)
        return Built(
            recipe=recipe,
            step_s=step_s,
            kv_tokens=kv_tokens,
            alone_ttft_s=edge.before_s + _prompt_s(recipe, self._prompt_tokens),
            alone_tpot_s=step_s(
                Batch(decodes=1.0, decode_context_tokens=lengths.decode_context_tokens)
            ),
            spreads_prompts=pace is None,
        )

    def band(self, candidate: Candidate) -> ErrorBand:
        """The engine's; for a kind of GPU that nobody measured, the widest of all engines'."""
        part, gpu = self.part(candidate), self._gpus[candidate.gpu]
        found, formats = part.profile, part.sizes.formats
        steps, first = [found.tpot], found.ttft
        source = f"measured rows of {found.engine}"
        if found.unmeasured:
            steps = [profile(name, gpu, formats).tpot for name in engines()]
            source = f"no measured row of {', '.join(found.unmeasured)}: the widest of all engines'"
        fast, slow = min(each.low for each in steps), max(each.high for each in steps)
        return ErrorBand(
            fast=min(1.0, fast),
            slow=max(1.0, slow),
            first_fast=min(1.0, first.low / found.tpot.low),
            first_slow=max(1.0, first.high / found.tpot.high),
            source=source,
            measured=not found.unmeasured,
        )


def missing_type(gpu: Gpu, model: PlannedModel, candidate: Candidate) -> str | None:
    """Which type of the weights or of KV this GPU has no arithmetic for."""
    computes = find_precision(model.counted_precision(candidate.precision)).computes
    has = sorted(gpu.flops)
    if computes not in ("bf16", "fp16", "fp32") and computes not in gpu.flops:
        return f"{gpu.name} has no {computes} arithmetic (it has {', '.join(has)})"
    if computes in ("bf16", "fp16") and not {"bf16", "fp16"} & gpu.flops.keys():
        return f"{gpu.name} has no 16-bit arithmetic (it has {', '.join(has)})"
    if candidate.kv_dtype == "fp8" and "fp8" not in gpu.flops:
        return f"{gpu.name} has no fp8 arithmetic, so KV can't be kept in fp8"
    return None


def batch_time(times: StepTimes, prompt_tokens: float, slowness: float) -> StepTime:
    """Step times of batches that need not be whole."""
    limits = times.span_limits

    def step_s(batch: Batch) -> float:
        return slowness * times.step_s(
            batch.decodes + batch.prefill_tokens,
            batch.decodes + batch.prefill_tokens / prompt_tokens,
            decoding=[batch.decodes * min(batch.decode_context_tokens, at) for at in limits],
            reading=[batch.prefill_tokens for _ in limits],
            pairs=[batch.prefill_tokens * min(batch.prefill_context_tokens, at) for at in limits],
        )

    return step_s


def _prompt_s(recipe: RooflineRecipe, prompt_tokens: int) -> float:
    """A prompt alone, in chunks."""
    cost, total_s, start = recipe.setup().cost, 0.0, 0
    while start < prompt_tokens:
        count = min(recipe.limits.max_batch_tokens, prompt_tokens - start)
        plan = StepPlan()
        plan.add(0, [0] * count, start, [])
        total_s += cost(plan)
        start += count
    return total_s


def check_context(model: PlannedModel, longest_tokens: int) -> None:
    if longest_tokens > model.spec.context_tokens:
        raise ConfigError(
            f"The longest request has {longest_tokens:,} tokens; the context of {model.name} is "
            f"{model.spec.context_tokens:,}.",
            "Plan for shorter requests, or with another model.",
            param="input",
        )
