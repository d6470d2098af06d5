"""Intervals of ratios, against textbooks' tables and a simulation as the oracles."""

from __future__ import annotations

import math
import random

import pytest

from headrace.core.ratio import Verdict, ratio_of_means, student, verdict_of

# Any textbook's table: degrees of freedom, both tails together, t.
TABLE = [(1, 0.05, 12.706), (2, 0.05, 4.303), (4, 0.05, 2.776), (10, 0.05, 2.228),
         (30, 0.05, 2.042), (1, 0.01, 63.657), (2, 0.01, 9.925), (5, 0.01, 4.032),
         (20, 0.01, 2.845), (7, 0.001, 5.408)]  # fmt: skip


@pytest.mark.parametrize(("freedom", "risk", "t"), TABLE)
def test_students_t(freedom: int, risk: float, t: float) -> None:
    assert student(freedom, risk) == pytest.approx(t, rel=5e-4)


@pytest.mark.parametrize("risk", [0.05, 0.01, 0.007])
def test_the_series_for_many_degrees_continues_the_integral(risk: float) -> None:
    assert student(199.9, risk) == pytest.approx(student(200.0, risk), rel=2e-5)
    values = [student(freedom, risk) for freedom in (1.0, 1.5, 2.0, 2.5, 10.0, 199.0, 201.0, 1e6)]
    assert values == sorted(values, reverse=True)


def test_verdicts() -> None:
    assert verdict_of(1.01, 2.0) is Verdict.BETTER
    assert verdict_of(0.5, 0.99) is Verdict.WORSE
    assert verdict_of(0.99, 1.5) is Verdict.INCONCLUSIVE


def test_ratios_are_as_textbooks_have_them() -> None:
    """Welch: equal variances and sizes give 2 (n - 1) degrees; t(4) = 2.776."""
    found = ratio_of_means([1.0, 2.0, 4.0], [2.0, 4.0, 8.0])
    assert found is not None
    reach = 2.776 * (2 * 0.480453 / 3) ** 0.5  # variance of log 1, 2, 4 = ln(2)^2
    assert found[0] == pytest.approx(2 * 2.718281828**-reach, rel=1e-3)
    assert found[1] == pytest.approx(2 * 2.718281828**reach, rel=1e-3)
    assert ratio_of_means([1.0, 2.0], [1.0, 2.0]) is None
    assert ratio_of_means([1.0, 1.0, 1.0], [2.0, 2.0, 2.0]) == pytest.approx((2.0, 2.0))


def test_the_interval_holds_the_true_ratio_as_often_as_it_says() -> None:
    draw = random.Random(7)
    held = 0
    for _ in range(1000):
        before = [math.exp(draw.gauss(0, 0.3)) for _ in range(5)]
        after = [math.exp(draw.gauss(math.log(1.4), 0.1)) for _ in range(4)]
        found = ratio_of_means(before, after)
        assert found is not None
        held += found[0] <= 1.4 <= found[1]
    assert 0.93 <= held / 1000 <= 0.985


def test_few_values_give_no_verdict() -> None:
    assert ratio_of_means([1.0, 1.1], [2.0, 2.1, 2.2]) is None
