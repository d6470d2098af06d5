"""Lengths and arrivals: their means against theory and against what is drawn, with fixed seeds."""

from __future__ import annotations

import math
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from statistics import fmean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import ConfigError
from headrace.workload.arrivals import ClosedLoop, OpenLoop, parse_arrivals
from headrace.workload.distribution import (
    Constant,
    Distribution,
    Empirical,
    Exponential,
    Lognormal,
    Normal,
    Uniform,
    parse_distribution,
)
from headrace.workload.workload import Lengths, parse_lengths

positive = st.floats(0.1, 1e4)
distributions: st.SearchStrategy[Distribution] = st.one_of(
    st.builds(Constant, positive),
    st.tuples(positive, positive).map(lambda ends: Uniform(min(ends), max(ends))),
    st.builds(Normal, positive, st.floats(0.1, 1e3)),
    st.builds(Lognormal, positive, st.floats(0.01, 3)),
    st.builds(Exponential, positive),
    st.lists(positive, min_size=1, max_size=20).map(lambda values: Empirical(tuple(values))),
)


@settings(max_examples=30, deadline=None)
@given(distributions, st.floats(0, 5e3), st.floats(0, 5e3), st.integers(0, 1000))
def test_the_mean_is_the_mean_of_what_is_drawn_within_bounds(
    one: Distribution, end: float, other: float, seed: int
) -> None:
    least, most = min(end, other), max(end, other)
    random = Random(seed)
    drawn = [min(max(one.draw(random), least), most) for _ in range(3000)]
    # Six standard errors of the mean, and a dozen draws from a tail that is too rare for them to
    # show: a wrong formula is off by far more.
    slack = 6 * pstdev(drawn) / math.sqrt(len(drawn)) + 1e-6 * (1 + most)
    slack += 12 * (most - least) / len(drawn)
    assert abs(one.mean_between(least, most) - fmean(drawn)) <= slack


@given(distributions, st.integers(0, 100), st.integers(0, 1000), st.integers(0, 99))
def test_lengths_stay_within_their_bounds(
    one: Distribution, least: int, more: int, seed: int
) -> None:
    lengths = Lengths(one, least, least + more)
    assert least <= lengths.draw(Random(seed)) <= least + more
    assert least <= lengths.mean <= least + more + 1e-6


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("rate_s", [0.5, 20.0])
def test_gaps_have_the_mean_and_the_variation_that_were_asked_for(cv: float, rate_s: float) -> None:
    times_s = list(islice(OpenLoop(rate_s=rate_s, cv=cv).times_s(Random(7)), 40_000))
    gaps = [after - before for before, after in pairwise(times_s)]
    assert min(gaps) >= 0
    assert fmean(gaps) == pytest.approx(1 / rate_s, rel=0.03)
    assert pstdev(gaps) * rate_s == pytest.approx(cv, rel=0.05, abs=1e-6)


def test_poisson_counts_have_the_variance_of_their_mean() -> None:
    """The counts in windows of a second: an oracle other than the gaps themselves."""
    counts = [0] * 4000
    for at_s in OpenLoop(rate_s=5.0).times_s(Random(3)):
        if at_s >= len(counts):
            break
        counts[int(at_s)] += 1
    assert fmean(counts) == pytest.approx(5.0, rel=0.03)
    assert pstdev(counts) ** 2 == pytest.approx(5.0, rel=0.06)


def test_twice_the_rate_is_the_same_arrivals_in_half_the_time() -> None:
    slow, fast = (
        list(islice(OpenLoop(rate_s=rate, cv=1.5).times_s(Random(1)), 50)) for rate in (1.0, 2.0)
    )
    assert fast == pytest.approx([at_s / 2 for at_s in slow])


def test_written_forms(tmp_path: Path) -> None:
    assert parse_distribution("512", "input") == Constant(512)
    assert parse_distribution("uniform:1,2", "input") == Uniform(1, 2)
    assert parse_distribution("normal:512,128", "input") == Normal(512, 128)
    assert parse_distribution("lognormal:512,0.8", "input") == Lognormal(512, 0.8)
    assert parse_distribution("exponential:3", "input") == Exponential(3)
    file = tmp_path / "lengths.txt"
    file.write_text("# tokens\n10\n\n30\n")
    assert parse_lengths(f"file:{file}", "input").mean == 20
    assert parse_arrivals("poisson", 2.0) == OpenLoop(rate_s=2.0)
    assert parse_arrivals("constant", 2.0) == OpenLoop(rate_s=2.0, cv=0.0)
    assert parse_arrivals("gamma:3", 2.0) == OpenLoop(rate_s=2.0, cv=3.0)
    assert parse_arrivals("closed:16", None) == ClosedLoop(clients=16)


@pytest.mark.parametrize(
    "text",
    ["", "abc", "-1", "uniform:2,1", "uniform:1", "normal:1,2,3", "lognormal:0,1", "nan", "inf"],
)
def test_bad_distributions_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="input"):
        parse_distribution(text, "input")


@pytest.mark.parametrize("content", ["", "ten\n", "-3\n", "nan\n"])
def test_bad_files_of_numbers_are_refused_by_line(tmp_path: Path, content: str) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"line 1|no numbers"):
        parse_distribution(f"file:{file}", "input")


@pytest.mark.parametrize(
    ("text", "rate_s"),
    [("poisson", None), ("closed:4", 1.0), ("closed", None), ("gamma:x", 1.0), ("poisson", 0.0),
     ("poisson:2", 1.0), ("gamma", 1.0), ("burst", 1.0), ("closed:0", None), ("gamma:-1", 1.0)],
)  # fmt: skip
def test_bad_arrivals_are_refused(text: str, rate_s: float | None) -> None:
    with pytest.raises(ConfigError):
        parse_arrivals(text, rate_s)
