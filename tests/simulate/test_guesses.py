"""Speculation in the simulator: with a set share of right guesses, on machines of all kinds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.core.step import RunnerLimits
from headrace.simulate.cost import linear_cost
from headrace.simulate.replica import UNBOUNDED, Setup
from headrace.simulate.report import Report
from headrace.simulate.serve import serve
from headrace.workload.ask import Ask

LIMITS = RunnerLimits(
    max_batch_tokens=512,
    max_sequences=64,
    total_blocks=4000,
    block_tokens=16,
    context_tokens=4096,
)
DEAR_STEPS = Setup(limits=LIMITS, cost=linear_cost(0.01, 5e-5), queue=UNBOUNDED)
DEAR_ROWS = replace(DEAR_STEPS, cost=linear_cost(0.001, 0.002))


def served(setup: Setup, streams: int, acceptance: float | None) -> Report:
    asks = [Ask(at_s=0.0, prompt_tokens=20, output_tokens=200) for _ in range(streams)]
    return serve(asks, replace(setup, acceptance=acceptance))


def lasted_s(report: Report) -> float:
    assert all(each.tokens == 200 and not each.refused for each in report.served)
    return max(each.end_s or 0.0 for each in report.served)


@pytest.mark.parametrize("streams", [1, 8, 64])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("setup", [DEAR_STEPS, DEAR_ROWS])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_guessing_never_costs_much(
    streams: int, acceptance: float, setup: Setup, in_flight: int
) -> None:
    setup = replace(setup, limits=replace(setup.limits, steps_in_flight=in_flight))
    plain, guessed = (served(setup, streams, share) for share in (None, acceptance))
    assert lasted_s(guessed) < 1.03 * lasted_s(plain)


@pytest.mark.parametrize("streams", [1, 8, 64])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_right_guesses_make_it_faster_where_steps_are_dear(streams: int, in_flight: int) -> None:
    setup = replace(DEAR_STEPS, limits=replace(LIMITS, steps_in_flight=in_flight))
    plain, guessed = (served(setup, streams, share) for share in (None, 0.8))
    assert lasted_s(plain) / lasted_s(guessed) > (1.3 if streams == 64 else 1.7)
    assert 0.25 < guessed.accepted_tokens / guessed.draft_tokens < 1


def test_nothing_is_guessed_where_it_can_not_pay() -> None:
    # But for the first steps, before the costs of rows are known.
    assert served(DEAR_ROWS, 32, 0.9).draft_tokens < 0.02 * 32 * 200
