"""Figures of a run that can be worked out by hand, and the verdict on a queue."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.config import SchedulerConfig
from headrace.core.errors import ConfigError
from headrace.core.step import RunnerLimits
from headrace.simulate.replica import UNBOUNDED, QueueLimits, Setup
from headrace.simulate.report import Report, band, quantile
from headrace.simulate.saturation import burst, saturation
from headrace.simulate.serve import serve
from headrace.simulate.served import Served
from headrace.simulate.verdict import Verdict, find_saturation, judge, line, present
from headrace.workload.arrivals import OpenLoop
from headrace.workload.ask import Ask
from headrace.workload.slo import Slo
from headrace.workload.workload import Synthetic, fixed


def served(
    arrival_s: float, first_s: float, end_s: float, tokens: int = 11, refused: str | None = None
) -> Served:
    ask = Ask(at_s=arrival_s, prompt_tokens=5, output_tokens=tokens)
    return Served(
        ask=ask,
        arrival_s=arrival_s,
        started_s=None if refused else arrival_s,
        first_s=None if refused else first_s,
        end_s=end_s,
        tokens=0 if refused else tokens,
        refused=refused,
    )


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), share=st.floats(0.0, 1.0))
def test_quantiles_are_numpys(values: list[float], share: float) -> None:
    expected = float(np.quantile(np.array(values), share))
    assert quantile(sorted(values), share) == pytest.approx(expected, abs=1e-6)


def test_latencies_and_goodput_by_hand() -> None:
    each_s = [
        served(at, at + (0.2 if at % 2 else 0.6), at + (1.2 if at % 2 else 1.6)) for at in range(10)
    ]
    report = Report(served=tuple(each_s), warm_share=0.0, drain_share=0.0)
    assert report.ttft_s is not None
    assert report.tpot_s is not None
    assert report.e2e_s is not None
    assert report.ttft_s.mean == pytest.approx(0.4)
    assert report.tpot_s.p50 == pytest.approx(0.1)  # 1 s for the ten tokens after the first
    assert report.e2e_s.most == pytest.approx(1.6)
    slo = Slo(ttft_s=0.5, tpot_s=0.2)
    assert report.met_share(slo) == 0.5
    assert report.window_s[1] == pytest.approx(10.2)
    assert report.output_tokens_s == pytest.approx(110 / 10.2)
    assert report.requests_s == pytest.approx(10 / 10.2)
    assert report.goodput_s(slo) == pytest.approx(5 / 10.2)
    assert not report.meets(slo)
    assert report.meets(Slo(ttft_s=0.7, share=1.0))


def test_a_refused_request_has_missed_its_objective() -> None:
    good, bad = served(0.0, 0.1, 0.2), served(0.1, 0.0, 0.1, refused="full")
    report = Report(served=(good, bad), warm_share=0.0, drain_share=0.0)
    assert report.met_share(Slo(ttft_s=1.0)) == 0.5
    assert report.refused == 1
    assert report.goodput_s(Slo(ttft_s=1.0)) == pytest.approx(report.requests_s)


def test_start_and_end_are_left_out_of_rates() -> None:
    """A steady stream has its own rate, however long the batch takes to fill and to empty."""
    each_s = [served(at / 10, at / 10 + 0.5, at / 10 + 5.5, tokens=51) for at in range(400)]
    report = Report(served=tuple(each_s))
    assert report.output_tokens_s == pytest.approx(510, rel=0.01)
    assert report.requests_s == pytest.approx(10, rel=0.01)
    whole = Report(served=tuple(each_s), warm_share=0.0, drain_share=0.0)
    assert whole.output_tokens_s < 470
    assert len(report.measured) == pytest.approx(340, abs=2)


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 20)), min_size=1, max_size=30))
@settings(max_examples=50)
def test_requests_in_the_system_add_up(spans: list[tuple[float, float]]) -> None:
    each_s = [served(at, at, at + took) for at, took in sorted(spans)]
    parts = present(each_s, 0.0, 100.0, 7)
    assert math.fsum(parts) * 100.0 / 7 == pytest.approx(math.fsum(t for _, t in spans), abs=1e-6)


def test_a_line_through_points() -> None:
    slope, error = line([3.0 + 2.0 * at for at in range(9)])
    assert slope == pytest.approx(2.0)
    assert error == pytest.approx(0.0, abs=1e-9)


def test_a_band_has_its_median() -> None:
    found = band([3.0, 1.0, 2.0, 9.0])
    assert (found.low, found.middle, found.high) == (1.0, 2.5, 9.0)


# -- the verdict -------------------------------------------------------------------------------

LIMITS = RunnerLimits(
    max_batch_tokens=256,
    max_sequences=1,
    total_blocks=256,
    block_tokens=16,
    context_tokens=256,
)


def run(rate: float, seed: int, count: int = 2000, queue: QueueLimits = UNBOUNDED) -> Report:
    """One request at a time, 1 s each in the mean: saturated from 1 request a second on."""
    chooser, at_s, asks = random.Random(seed), 0.0, []
    for _ in range(count):
        at_s += chooser.expovariate(rate)
        asks.append(Ask(at_s=at_s, prompt_tokens=1, output_tokens=1))
    setup = Setup(
        limits=LIMITS,
        cost=lambda plan: chooser.expovariate(1.0),
        config=SchedulerConfig(prefix_cache=False),
        queue=queue,
    )
    return serve(asks, setup)


@pytest.mark.parametrize(
    ("rate", "verdict"),
    [(0.5, Verdict.STABLE), (0.8, Verdict.STABLE), (1.2, Verdict.SATURATED)],
)
def test_a_queue_that_grows_is_seen(rate: float, verdict: Verdict) -> None:
    assert [run(rate, seed).verdict for seed in range(4)] == [verdict] * 4


@pytest.mark.parametrize(
    ("load", "verdict"),
    [(0.75, Verdict.STABLE), (0.92, Verdict.STABLE), (1.08, Verdict.SATURATED)],
)
def test_a_batch_that_varies_is_not_a_queue_that_grows(load: float, verdict: Verdict) -> None:
    """32 places, and steps that take longer with more in them: what is in the server varies by
    more than a small overload adds."""
    setup = Setup(
        limits=replace(LIMITS, max_sequences=32, total_blocks=1024),
        cost=lambda plan: 0.01 + 0.0002 * len(plan),
        config=SchedulerConfig(prefix_cache=False, max_step_growth=1e9),
        queue=UNBOUNDED,
    )
    rate = load * 32 / (30 * (0.01 + 0.0002 * 32))  # 30 steps of a full batch a request
    workload = Synthetic(prompts=fixed(8), outputs=fixed(30), arrivals=OpenLoop(rate_s=rate))
    found = [serve(workload.asks(seed, 2000), setup).verdict for seed in range(3)]
    assert found == [verdict] * 3


def test_a_closed_loop_is_never_saturated_and_short_sessions_are_unclear() -> None:
    def turns(clients: int, count: int, wait_s: float) -> Report:
        asks = [
            Ask(
                at_s=0.1 * client,
                prompt_tokens=4,
                output_tokens=1,
                session=client,
                turn=turn,
                after_s=wait_s if turn else None,
            )
            for client in range(clients)
            for turn in range(count)
        ]
        return serve(asks, Setup(limits=LIMITS, cost=lambda plan: 1.0, queue=UNBOUNDED))

    assert turns(clients=5, count=40, wait_s=0.0).verdict is Verdict.STABLE
    # Conversations take longer than the time in which they began.
    assert turns(clients=40, count=5, wait_s=30.0).verdict is Verdict.UNCLEAR


def test_a_full_queue_is_saturated_though_it_can_not_grow() -> None:
    report = run(1.3, 0, queue=QueueLimits(max_waiting_requests=20))
    assert report.refused > 0.1 * len(report.served)
    assert report.saturated
    assert not report.meets(Slo(ttft_s=1e6, share=0.01))


def test_too_few_requests_say_nothing() -> None:
    assert run(0.5, 0, count=20).verdict is Verdict.UNCLEAR
    burst = [served(0.001 * at, 5.0, 10.0) for at in range(100)]
    assert judge(burst) is Verdict.UNCLEAR  # all came before the first had ended


def test_the_bracket_has_the_saturation_in_it() -> None:
    bracket = find_saturation(lambda rate: run(rate, 3, 3000).verdict, 0.3)
    assert 0.8 < bracket.stable < bracket.saturated < 1.15
    assert bracket.saturated <= bracket.stable * 1.05
    assert str(bracket) == (f"between {bracket.stable:.3g} and {bracket.saturated:.3g} requests/s")


@given(true=st.floats(1e-3, 1e3), guess=st.floats(1e-3, 1e3))
@settings(max_examples=50)
def test_a_bracket_is_found_from_any_guess(true: float, guess: float) -> None:
    def judged(rate: float) -> Verdict:
        return Verdict.STABLE if rate < true else Verdict.SATURATED

    bracket = find_saturation(judged, guess, most_runs=60)
    assert bracket.stable < true <= bracket.saturated <= bracket.stable * 1.05


def test_a_bracket_is_as_wide_as_what_is_not_clear() -> None:
    def judged(rate: float) -> Verdict:
        if rate < 8:
            return Verdict.STABLE
        return Verdict.SATURATED if rate > 12 else Verdict.UNCLEAR

    bracket = find_saturation(judged, 4.0)
    assert 8 / 1.05 <= bracket.stable < 8
    assert 12 < bracket.saturated <= 12 * 1.05
    assert len(bracket.rates) < 16
    with pytest.raises(ConfigError, match="above 0"):
        find_saturation(judged, 0.0)


def test_a_workloads_saturation_lies_around_what_a_full_server_does() -> None:
    """Eight places, 0.01 s a step whatever is in it: 8 x 100 tokens a second, 40 of them a request,
    and a step for each prompt."""
    workload = Synthetic(prompts=fixed(16), outputs=fixed(40), arrivals=OpenLoop(rate_s=1.0))
    setup = Setup(
        limits=replace(LIMITS, max_sequences=8),
        cost=lambda plan: 0.01,
        config=SchedulerConfig(prefix_cache=False, max_step_growth=1e9),
        queue=UNBOUNDED,
    )
    full = burst(workload.asks(0, 200), setup)
    assert full.requests_s == pytest.approx(20, rel=0.03)
    bracket = saturation(workload, setup, seeds=(0, 1))
    assert bracket.stable < 20.5
    assert bracket.saturated > 19.5
    assert bracket.saturated < 1.25 * bracket.stable


def test_a_setup_that_serves_nothing_has_no_saturation() -> None:
    workload = Synthetic(prompts=fixed(999), outputs=fixed(4), arrivals=OpenLoop(rate_s=1.0))
    with pytest.raises(ConfigError, match="None of the 400 requests"):
        saturation(workload, Setup(limits=LIMITS, cost=lambda plan: 0.01))
