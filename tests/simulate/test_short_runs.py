"""Short runs far below saturation are not called saturated because arrivals come in clusters."""

from __future__ import annotations

from headrace.core.step import RunnerLimits
from headrace.simulate.cost import linear_cost
from headrace.simulate.replica import UNBOUNDED, Setup
from headrace.simulate.serve import serve
from headrace.simulate.verdict import Verdict
from headrace.workload.arrivals import OpenLoop
from headrace.workload.workload import Synthetic, fixed


def verdicts(rate: float, requests: int, runs: int, sequences: int) -> list[Verdict]:
    limits = RunnerLimits(
        max_batch_tokens=2048,
        max_sequences=sequences,
        total_blocks=20_000,
        block_tokens=16,
        context_tokens=8192,
    )
    setup = Setup(limits=limits, cost=linear_cost(0.015, 2e-5), queue=UNBOUNDED)
    workload = Synthetic(prompts=fixed(200), outputs=fixed(40), arrivals=OpenLoop(rate_s=rate))
    return [serve(workload.asks(seed, requests), setup).verdict for seed in range(runs)]


def test_chance_is_not_growth() -> None:
    # A step of 15 ms holds 256 sequences: 30 requests/s of 40 tokens are a tenth of what it can.
    found = verdicts(30.0, 150, 20, sequences=256)
    assert found.count(Verdict.SATURATED) <= 1


def test_growth_is_found_all_the_same() -> None:
    # 32 sequences of 40 steps of 15 ms and more: at most 53 requests/s.
    assert set(verdicts(60.0, 600, 3, sequences=32)) == {Verdict.SATURATED}
