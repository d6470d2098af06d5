from __future__ import annotations

import math
from random import Random

import pytest

from headrace.bench.interval import (
    grouped_percentile,
    least_count,
    mean,
    percentile,
    quantile,
    slope,
)


@pytest.mark.parametrize(("share", "needed"), [(0.5, 6), (0.9, 29), (0.95, 59), (0.99, 299)])
def test_how_many_values_a_percentile_needs(share: float, needed: int) -> None:
    """0.99 ** 299 < 5%: a P99 of 32 requests is refused."""
    assert least_count(share) == needed
    assert percentile([float(n) for n in range(needed - 1)], share) is None
    found = percentile([float(n) for n in range(needed)], share)
    assert found is not None
    assert found.low <= found.value <= found.high


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("count", [300, 1000])
def test_intervals_hold_what_they_promise(share: float, count: int) -> None:
    """Of 400 samples with a known percentile at least 93% enclose it; binomially, 95% is promised,
    and fewer than 372 of 400 come once in a few hundred draws. The seed is fixed."""
    random, true = Random(3), -math.log(1 - share)
    held = 0
    for _ in range(400):
        found = percentile(sorted(random.expovariate(1) for _ in range(count)), share)
        assert found is not None
        held += found.low <= true <= found.high
    assert held >= 372


def test_the_interval_of_a_median_is_that_of_textbooks() -> None:
    """n = 20: the 6th and the 15th value (Conover, Practical Nonparametric Statistics)."""
    found = percentile([float(n) for n in range(1, 21)], 0.5)
    assert found is not None
    assert (found.value, found.low, found.high) == (10.5, 6.0, 15.0)


def test_quantiles_are_as_numpy_has_them() -> None:
    assert quantile([1.0, 2.0, 4.0, 8.0], 0.5) == 3.0
    assert quantile([1.0, 2.0, 4.0, 8.0], 0.9) == pytest.approx(6.8)
    assert quantile([5.0], 0.99) == 5.0


def test_gaps_of_few_answers_have_no_interval() -> None:
    """Ten thousand gaps of four answers are four answers."""
    assert grouped_percentile([[0.01 + n / 100] * 2500 for n in range(4)], 0.5) is None
    found = grouped_percentile([[0.01 + n / 1000] * 100 for n in range(40)], 0.5)
    assert found is not None
    assert found.low < found.value < found.high
    # As if the 4,000 were independent, it would be far narrower.
    naive = percentile(sorted(0.01 + n / 1000 for n in range(40) for _ in range(100)), 0.5)
    assert naive is not None
    assert found.half_width > 2 * naive.half_width


def test_slopes() -> None:
    xs = [float(n) for n in range(30)]
    rising = slope(xs, [2 * x + (-1) ** n for n, x in enumerate(xs)])
    flat = slope(xs, [(-1.0) ** n for n in range(30)])
    assert rising is not None
    assert flat is not None
    assert rising.is_positive
    assert not flat.is_positive
    assert rising.low < 2 < rising.high
    assert slope([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) is None


def test_a_mean_needs_three_values() -> None:
    assert mean([1.0, 2.0]) is None
    found = mean([1.0, 2.0, 3.0])
    assert found is not None
    assert found.high - found.value == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
