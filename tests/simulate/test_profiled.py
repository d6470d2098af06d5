"""A replica made of a profile does what the profile measured, on a virtual clock."""

from __future__ import annotations

from statistics import fmean, median

import pytest
from tests.profiles import (
    HOST_S,
    ROUND_TRIP_S,
    SENT_S,
    TAKEN_S,
    WAY_IN_S,
    profile,
    true_s,
)

from headrace.simulate.profiled import Noise, setup_of
from headrace.simulate.serve import serve
from headrace.workload.arrivals import ClosedLoop, OpenLoop
from headrace.workload.ask import Ask
from headrace.workload.workload import Synthetic, fixed

GAPS = (0.8, 0.9, 1.0, 1.05, 1.6)


def test_a_request_alone_takes_its_way_its_step_and_what_serving_adds() -> None:
    ask = Ask(at_s=1.0, prompt_tokens=64, output_tokens=33)
    (served,) = serve([ask], setup_of(profile())).served
    added_s = 2 * HOST_S + SENT_S + TAKEN_S
    step_s = true_s(0, 0, 64, 65 / 2)
    way_s = WAY_IN_S + 64e-6 + ROUND_TRIP_S / 2
    assert served.ttft_s == pytest.approx(way_s + step_s + added_s, rel=1e-6)
    # Tokens 2 to 33 come after contexts of 64 to 95.
    assert served.tpot_s == pytest.approx(true_s(1, 79.5, 0, 0) + added_s, rel=1e-6)


@pytest.mark.parametrize("streams", [4, 16])
def test_streams_at_once_come_as_fast_as_they_were_measured(streams: int) -> None:
    workload = Synthetic(
        prompts=fixed(16), outputs=fixed(497), arrivals=ClosedLoop(clients=streams)
    )
    report = serve(workload.asks(0, streams), setup_of(profile()))
    measured = true_s(streams, 264, 0, 0) + 2 * HOST_S + (SENT_S + TAKEN_S) * streams
    assert report.served[-1].tpot_s == pytest.approx(measured, rel=0.02)


def test_without_a_server_only_the_engine_is_added() -> None:
    ask = Ask(at_s=0.0, prompt_tokens=64, output_tokens=2)
    (served,) = serve([ask], setup_of(profile(serves=False))).served
    assert served.ttft_s == pytest.approx(true_s(0, 0, 64, 65 / 2) + 2 * HOST_S)


def test_noise_is_that_of_the_gaps_and_the_same_by_seed() -> None:
    noise, again = (Noise(GAPS, 0.01, seed=4) for _ in range(2))
    drawn = [noise(0.01) for _ in range(4000)]
    assert drawn == [again(0.01) for _ in range(4000)]
    assert set(drawn) == set(GAPS)
    assert median(drawn) == pytest.approx(1.0)
    assert fmean(drawn) == pytest.approx(fmean(GAPS), abs=0.02)
    # A step as long as nine gaps is more even.
    long = [noise(0.09) for _ in range(500)]
    assert max(long) - min(long) < max(drawn) - min(drawn)
    assert fmean(long) == pytest.approx(fmean(GAPS), abs=0.02)


def test_a_seed_gives_the_same_report_and_another_one_does_not() -> None:
    workload = Synthetic(prompts=fixed(32), outputs=fixed(20), arrivals=OpenLoop(rate_s=4.0))

    def ends(seed: int | None) -> list[float | None]:
        setup = setup_of(profile(gaps=GAPS), seed=seed)
        return [each.end_s for each in serve(workload.asks(0, 40), setup).served]

    assert ends(1) == ends(1)
    assert ends(1) != ends(2)
    assert ends(None) == ends(None)
