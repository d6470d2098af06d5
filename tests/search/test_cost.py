"""Costs against the worked examples of the seeds, corrected, and against brute force."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headrace.core.errors import ConfigError
from headrace.hardware.api_prices import ApiPrice, find_api, parse_api
from headrace.search.cost import (
    Bill,
    Hosting,
    Mix,
    bill,
    break_even,
    judge,
    refuse_stream,
    show_tokens,
    stream_usd_per_million,
)

OUTPUT_ONLY = Mix(input_tokens=0, output_tokens=256)


def of(usd_per_hour: float, rate: float, **more: float) -> Hosting:
    return Hosting(
        output_tokens_s=rate,
        mix=OUTPUT_ONLY,
        gpus=2,
        usd_per_gpu_hour=usd_per_hour / 2,
        **more,
    )


def flat(usd: float) -> ApiPrice:
    """An API as the seeds give it: one blended price."""
    return parse_api(f"api={usd}/{usd}")


# -- SEEDS-ERRATA --------------------------------------------------------------


@pytest.mark.parametrize(
    ("usd_per_hour", "tokens_s", "expected"), [(6.40, 118, 15.07), (9.80, 215, 12.66),
                                               (5.20, 98, 14.74)]
)  # fmt: skip
def test_one_streams_rate_is_refused_with_what_it_would_make(
    usd_per_hour: float, tokens_s: float, expected: float
) -> None:
    assert round(stream_usd_per_million(tokens_s, usd_per_hour), 2) == expected
    refused = refuse_stream(tokens_s, usd_per_hour)
    assert f"${expected} a million" in refused.cause
    assert "one stream" in refused.cause
    assert "--rate" in refused.remedy


@pytest.mark.parametrize(
    ("usd_per_hour", "month", "claimed", "needed"),
    [(6.40, 4608, 1.60, 1111), (9.80, 7056, 0.91, 2991)],
)
def test_the_rate_that_the_claimed_prices_need(
    usd_per_hour: float, month: float, claimed: float, needed: int
) -> None:
    """$1.60 and $0.91 a million need that many tokens/s, all month."""
    hosting = of(usd_per_hour, needed)
    assert hosting.replica_usd == pytest.approx(month)
    full = bill(hosting, hosting.capacity_tokens)
    assert full.usd_per_million == pytest.approx(claimed, abs=0.005)
    assert full.busy_share == pytest.approx(1)


@pytest.mark.parametrize(("usd_per_hour", "expected"), [(6.40, 57.60), (9.80, 88.20)])
def test_at_the_claimed_volume(usd_per_hour: float, expected: float) -> None:
    found = bill(of(usd_per_hour, 3000), 80e6)
    assert found.usd_per_million == pytest.approx(expected)
    assert found.replicas == 1


def test_break_even_of_two_h100s() -> None:
    hosting = of(9.80, 215)
    assert hosting.capacity_tokens == pytest.approx(557.28e6)
    against_gpt4 = break_even(hosting, flat(20))
    assert against_gpt4.tokens == pytest.approx(352.8e6)  # not 47M
    assert against_gpt4.replicas == 1
    against_4o = break_even(hosting, flat(7.5))
    assert against_4o.one_replica_tokens == pytest.approx(940.8e6)
    assert against_4o.tokens is None  # above its capacity, and more replicas cost as much each
    verdict = judge(hosting, [against_4o], 80e6)
    assert verdict.is_cheaper is False
    for words in ("940.8M", "above its capacity of 557.3M", "$12.66", "$7.50"):
        assert words in verdict.text


def test_replicas_by_rate() -> None:
    """20 requests/s of 300 tokens at 1,200 tokens/s a replica: 5."""
    hosting = Hosting(output_tokens_s=1200, mix=Mix(input_tokens=512, output_tokens=300))
    found = bill(hosting, hosting.tokens_for(20))
    assert found.replicas == 5
    assert found.busy_share == pytest.approx(1)
    assert found.usd is None  # GPUs without money
    assert found.gpu_hours == 5 * 720


# -- the rest --------------------------------------------------------------


def test_a_mix_blends_by_its_tokens() -> None:
    api = find_api("gpt-4o")
    mix = Mix(input_tokens=900, output_tokens=100, cached_share=0.5)
    assert mix.blended_usd(api) == pytest.approx(0.45 * 2.5 + 0.45 * 1.25 + 0.1 * 10)
    uncached = parse_api("x=2/4")  # no price for cached input: it costs as other
    assert mix.blended_usd(uncached) == pytest.approx(0.9 * 2 + 0.1 * 4)


def check_parts(hosting: Hosting, found: Bill) -> None:
    assert found.parts is not None
    assert found.usd_per_million is not None
    prices = (found.parts.input_usd, found.parts.cached_input_usd, found.parts.output_usd)
    together = sum(n * p for n, p in zip(hosting.mix.parts, prices, strict=True))
    assert together / hosting.mix.total_tokens == pytest.approx(found.usd_per_million)


def test_the_parts_make_the_whole() -> None:
    mix = Mix(input_tokens=900, output_tokens=100, cached_share=0.5)
    by_price = Hosting(output_tokens_s=500, mix=mix, usd_per_gpu_hour=3.0)
    found = bill(by_price, 1e9, find_api("gpt-4o"))
    check_parts(by_price, found)
    assert found.parts is not None
    assert found.parts.output_usd / found.parts.input_usd == pytest.approx(4)
    by_time = Hosting(output_tokens_s=500, mix=mix, usd_per_gpu_hour=3.0, prefill_share=0.3)
    found = bill(by_time, 1e9, find_api("gpt-4o"))
    check_parts(by_time, found)
    assert found.parts is not None
    assert found.parts.cached_input_usd == 0
    assert bill(by_price, 1e9).parts is None  # nothing to divide by


def test_engineering_moves_the_break_even() -> None:
    api = flat(20)
    plain, worked = of(9.80, 215), of(9.80, 215, engineering_hours=20, engineering_usd_per_hour=100)
    assert worked.engineering_usd == 2000
    assert break_even(worked, api).tokens == pytest.approx((7056 + 2000) / 20 * 1e6)
    assert break_even(plain, api).tokens == pytest.approx(352.8e6)


def test_utilization_needs_more_replicas() -> None:
    assert of(9.80, 215, utilization=0.5).replicas_for(557.28e6) == 2
    assert of(9.80, 215).replicas_for(557.28e6) == 1  # rounding adds none
    assert of(9.80, 215).replicas_for(557.3e6) == 2
    half = bill(of(9.80, 215, utilization=0.5), 557.28e6)
    assert half.busy_share == pytest.approx(0.5)
    assert half.idle_gpu_hours == pytest.approx(1440)


@given(
    usd=st.floats(0.5, 40),
    rate=st.floats(50, 20_000),
    price=st.floats(0.05, 40),
    work=st.sampled_from([0.0, 500.0, 8000.0, 100_000.0]),
)
def test_break_even_is_where_brute_force_finds_it(
    usd: float, rate: float, price: float, work: float
) -> None:
    hosting = of(usd, rate, engineering_hours=1.0, engineering_usd_per_hour=work)
    found = break_even(hosting, flat(price))
    capacity = hosting.capacity_tokens

    def saves(tokens: float) -> float:
        own = hosting.usd_for(tokens)
        assert own is not None
        return price * tokens / 1e6 - own

    # The API's line rises and the stairs are level: within a step, its end is the best volume.
    first = next((n for n in range(1, 200) if saves(n * capacity) >= 0), None)
    assume(found.replicas is None or found.replicas < 150)
    gain = price * capacity / 1e6 - (hosting.replica_usd or 0)
    assume(abs(gain) > 1e-6 * price * capacity / 1e6)
    if first is None:
        assert found.tokens is None or (found.replicas or 0) >= 150
        return
    assert found.replicas == first
    assert found.tokens is not None
    assert saves(found.tokens) == pytest.approx(0, abs=1e-6 * price * found.tokens / 1e6)
    assert found.lasting_replicas is not None
    assert found.lasting_tokens is not None
    for n in range(found.lasting_replicas, found.lasting_replicas + 50):
        assert saves(n * capacity * (1 + 1e-6)) >= -1e-3 * price * n * capacity / 1e6
    if found.lasting_replicas > 1:  # one step earlier the API is cheaper again
        assert saves((found.lasting_replicas - 1) * capacity * (1 + 1e-6)) < 0


@given(st.floats(1e6, 1e12), st.floats(10, 50_000), st.floats(0.05, 1))
def test_a_bill_adds_up(tokens: float, rate: float, utilization: float) -> None:
    found = bill(of(6.40, rate, utilization=utilization), tokens)
    assert 0 < found.busy_share <= utilization * (1 + 1e-6)
    assert found.idle_gpu_hours == pytest.approx(
        found.gpu_hours - tokens / (rate * 3600) * 2, abs=1e-6 * found.gpu_hours
    )
    assert found.usd == pytest.approx(found.gpu_hours * 3.2)
    assert found.usd_per_million == pytest.approx((found.usd or 0) / tokens * 1e6)


def test_the_most_that_a_gpu_may_cost() -> None:
    hosting = Hosting(output_tokens_s=1000, mix=OUTPUT_ONLY, gpus=2)
    found = break_even(hosting, flat(10))
    assert found.tokens is None
    # 3.6M tokens an hour at $10 a million are $36, for two GPUs.
    assert found.most_usd_per_gpu_hour == pytest.approx(18)
    verdict = judge(hosting, [found], 80e6)
    assert verdict.is_cheaper is None
    assert "$18.00" in verdict.text


def test_verdicts() -> None:
    hosting = of(9.80, 2000)
    breaks = [break_even(hosting, flat(20)), break_even(hosting, flat(7.5))]
    at_volume = judge(hosting, breaks, 2e9)
    assert at_volume.is_cheaper
    assert at_volume.text.startswith("Host it yourself: 2B tokens a month cost $7,056 on 1 replica")
    anywhere = judge(hosting, breaks, None)
    assert anywhere.is_cheaper
    assert "940.8M" in anywhere.text
    assert judge(hosting, [], 1e6).is_cheaper is None


def test_a_full_replica_that_costs_as_much_as_the_api() -> None:
    hosting = of(3.6, 1000)  # $1 a million exactly
    found = break_even(hosting, flat(1.0))
    assert found.lasting_tokens is None or math.isclose(found.lasting_tokens, 2.592e9)


@pytest.mark.parametrize(
    "field",
    [{"output_tokens_s": 0}, {"output_tokens_s": math.nan}, {"gpus": 0}, {"hours": 0},
     {"utilization": 0}, {"utilization": 1.1}, {"usd_per_gpu_hour": -1}, {"prefill_share": 2},
     {"engineering_hours": -1}, {"output_tokens_s": math.inf}],
)  # fmt: skip
def test_bad_values_are_refused(field: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        Hosting(**({"output_tokens_s": 100, "mix": OUTPUT_ONLY} | field))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="output"):
        Mix(input_tokens=1, output_tokens=0)
    with pytest.raises(ConfigError, match="cached"):
        Mix(input_tokens=1, output_tokens=1, cached_share=1.5)


def test_tokens_for_a_person() -> None:
    assert [show_tokens(n) for n in (0, 900, 80e6, 557.28e6, 1.115e9, 999.99e6, 2.5e12)] == [
        "0", "900", "80M", "557.3M", "1.115B", "1B", "2.5T"]  # fmt: skip
