"""Real models on real GPUs: the worked examples of the seeds, corrected, and what bounds say."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headrace.hardware.gpus import find_gpu
from headrace.models.known import find_known
from headrace.search.answer import Why
from headrace.search.branch import least_replicas
from headrace.search.candidate import Candidate
from headrace.search.demand import lengths_of
from headrace.search.machine import Machines, Space
from headrace.search.models import PlannedModel, precisions_for
from headrace.search.question import Question
from headrace.search.sift import Sift
from headrace.search.steady import Batch
from headrace.workload.arrivals import OpenLoop
from headrace.workload.slo import Slo, parse_slo
from headrace.workload.workload import Synthetic, fixed


def asked(
    prompt: int = 512, output: int = 300, rate: float = 20.0, slo: Slo | None = None
) -> Question:
    workload = Synthetic(
        prompts=fixed(prompt), outputs=fixed(output), arrivals=OpenLoop(rate_s=1.0)
    )
    return Question(
        workload=workload,
        lengths=lengths_of(workload, 0),
        rate=rate,
        slo=slo or parse_slo("ttft=500ms,tpot=50ms"),
    )


def machines(
    model: str, gpus: Sequence[str], question: Question | None = None, **more: object
) -> Machines:
    known = find_known(model)
    planned = PlannedModel(
        name=known.id,
        spec=known.spec,
        precision=known.precision,
        precisions=precisions_for(known.precision, ()),
    )
    found = tuple(map(find_gpu, gpus))
    prices = {gpu.name: 1.0 for gpu in found}
    space = Space(models=(planned,), gpus=found, prices=prices, **more)  # type: ignore[arg-type]
    return Machines(space, question or asked())


def one(made: Machines, **fields: object) -> Candidate:
    """The first candidate with these values."""
    return next(
        candidate
        for candidate in made.candidates()
        if all(getattr(candidate, name) == value for name, value in fields.items())
    )


@pytest.fixture(scope="module")
def llama_70b() -> Machines:
    return machines("llama-3.1-70b", ["h200-sxm", "h100-sxm", "a100-sxm-80gb"])


def test_70b_needs_four_h200_in_bf16_and_two_in_fp8(llama_70b: Machines) -> None:
    """20 requests/s of 512 and 300 tokens are 2.29 PFLOP/s: no candidate's bound allows fewer GPUs,
    not even with ideal step times at the fast end of the band."""
    question = asked()
    sift = Sift(llama_70b, question)
    fewest: dict[str, int] = {}
    for candidate in llama_70b.candidates():
        if candidate.gpu != "h200-sxm" or llama_70b.refuse(candidate) is not None:
            continue
        bound = sift.bound_of(candidate, llama_70b.band(candidate).fast)
        assert bound is not None
        gpus = least_replicas(20.0, bound) * candidate.tp
        fewest[candidate.precision] = min(gpus, fewest.get(candidate.precision, gpus))
    assert fewest["bf16"] >= 4
    assert fewest["fp8"] >= 2


def test_what_rules_candidates_out(llama_70b: Machines) -> None:
    def loss(**fields: object) -> tuple[Why, str]:
        found = llama_70b.refuse(one(llama_70b, **fields))
        assert found is not None
        return found.why, found.text

    why, text = loss(gpu="a100-sxm-80gb", precision="fp8")
    assert why is Why.TYPE
    assert "no fp8 arithmetic" in text
    why, text = loss(gpu="h200-sxm", precision="bf16", tp=1)
    assert why is Why.MEMORY
    assert "131.4 GiB" in text  # 70.55e9 x 2 bytes


def test_tp_that_does_not_divide() -> None:
    made = machines("llama-3.1-70b", ["h200-sxm"], tps=(3,))
    found = made.refuse(one(made, precision="bf16"))
    assert found is not None
    assert found.why is Why.DIVIDES  # 8 KV heads do not divide by 3
    assert "3 GPUs do not divide" in found.text


def test_floors_are_those_of_the_seeds() -> None:
    """A stream of a 70B on two H100s gives at most 47.5 tokens/s in 16 bits."""
    made = machines("llama-3.1-70b", ["h100-sxm"], asked(slo=Slo(tpot_s=0.0205)))
    found = made.refuse(one(made, precision="bf16", tp=2))
    assert found is not None
    assert found.why is Why.TPOT
    floor_ms = made.part(one(made, precision="bf16", tp=2)).floors.one_tpot_s * 1e3
    assert 1000 / floor_ms == pytest.approx(47.5, rel=0.02)


def test_kv_room_is_the_ledgers(llama_70b: Machines) -> None:
    """70B in FP8 on one H100: a few thousand tokens of KV, which does not serve."""
    few = llama_70b.kv_tokens(one(llama_70b, gpu="h100-sxm", precision="fp8", tp=1))
    assert 0 < few < 12_300
    many = llama_70b.kv_tokens(one(llama_70b, gpu="h100-sxm", precision="fp8", tp=2))
    assert many > 8 * few


def test_steady_batches_cost_what_plans_cost(llama_70b: Machines) -> None:
    from headrace.core.step import StepPlan

    candidate = one(llama_70b, gpu="h200-sxm", precision="fp8", tp=2)
    built = llama_70b.build(candidate, 1.1)
    plan = StepPlan()
    for row in range(40):
        plan.add(row, [0], 661, [])
    batch = Batch(decodes=40.0, decode_context_tokens=662.0)
    assert built.step_s(batch) == pytest.approx(built.recipe.setup().cost(plan))


def test_step_times_grow_with_what_a_step_holds(llama_70b: Machines) -> None:
    """What the bound of the steady state relies on."""
    candidate = one(llama_70b, gpu="h200-sxm", precision="fp8", tp=2)
    step_s = llama_70b.build(candidate, 1.0).step_s
    times = [step_s(Batch(decodes=n, decode_context_tokens=600)) for n in (1, 8, 64, 256, 1024)]
    assert times == sorted(times)
    ends = [step_s(Batch(decodes=n, decode_context_tokens=600)) for n in (100, 200, 300)]
    assert ends[1] <= (ends[0] + ends[2]) / 2 + 1e-9


def test_the_simulator_stays_below_the_bound() -> None:
    question = asked(rate=200.0, prompt=128, output=32, slo=parse_slo("ttft=1s,tpot=100ms"))
    made = machines("llama-3.1-8b", ["h100-sxm"], question, tps=(1,))
    candidate = one(made, precision="bf16", max_sequences=256, batch_tokens=2048)
    bound = Sift(made, question).bound_of(candidate, 1.0)
    assert bound is not None
    from headrace.search.jobs import Job, run_job

    job = Job(
        candidate=candidate,
        recipe=made.build(candidate, 1.0).recipe,
        rate=bound * 1.05,
        seed=1,
        slowness=1.0,
        lateness=1.0,
        requests=3000,
    )
    assert not run_job(question, job).holds


def test_mixtures_of_experts_and_latent_attention_are_timed() -> None:
    made = machines("deepseek-ai/DeepSeek-V3", ["h200-sxm"], tps=(8, 16))
    found = [made.refuse(c) for c in made.candidates() if c.tp == 16]
    assert any(loss is None for loss in found)
    candidate = next(c for c in made.candidates() if c.tp == 16 and made.refuse(c) is None)
    built = made.build(candidate, 1.0)
    assert 0.001 < built.alone_tpot_s < 0.1
    assert built.kv_tokens > 10_000
