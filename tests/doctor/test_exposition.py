"""Prometheus' text format, against its own client library as the oracle, and buckets."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest

from headrace.doctor.buckets import Buckets, added, of_cumulative
from headrace.doctor.exposition import read_page


@given(st.lists(st.tuples(st.text(max_size=8), st.floats(allow_nan=False)), max_size=6))
def test_labels_and_values_as_the_client_library_writes_them(
    pairs: list[tuple[str, float]],
) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("some:level", "x", ["which"], registry=registry)
    wanted = {}
    for label, value in pairs:
        gauge.labels(which=label).set(value)
        wanted[label] = value
    page = read_page(generate_latest(registry).decode())
    found = {s.labels["which"]: s.value for s in page.samples("some:level")}
    assert found == wanted
    assert page.unread_lines == 0


def test_what_is_not_a_sample_is_counted_and_left_out() -> None:
    page = read_page('good 1\nbad{label=} 2\nworse two\n# a comment\nnan NaN\ngood{a="b"} 3 1700\n')
    assert [s.value for s in page.samples("good")] == [1, 3]
    assert page.unread_lines == 3
    assert not page.samples("nan")


@given(st.lists(st.floats(0, 100), min_size=1, max_size=60), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_quantile_is_within_its_bucket(values: list[float], share: float) -> None:
    registry = CollectorRegistry()
    histogram = Histogram("h", "x", buckets=(0.1, 1, 10, 50), registry=registry)
    for value in values:
        histogram.observe(value)
    page = read_page(generate_latest(registry).decode())
    cumulative = {float(s.labels["le"]): s.value for s in page.samples("h_bucket")}
    found = of_cumulative(cumulative, page.samples("h_sum")[0].value).quantile(share)
    assert found is not None
    exact = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    assert found.low <= exact <= found.high


def test_a_histogram_that_fell_was_restarted() -> None:
    before = Buckets(bounds=(1.0, math.inf), counts=(10.0, 2.0), total=8.0)
    after = Buckets(bounds=(1.0, math.inf), counts=(3.0, 1.0), total=4.0)
    assert added(before, after) == after
    later = Buckets(bounds=(1.0, math.inf), counts=(12.0, 2.0), total=9.0)
    assert added(before, later).counts == (2.0, 0.0)
    assert added(before, later).total == pytest.approx(1.0)


def test_nothing_added_has_no_quantile_and_no_mean() -> None:
    empty = Buckets(bounds=(1.0, math.inf), counts=(0.0, 0.0), total=0.0)
    assert empty.mean is None
    assert empty.quantile(0.5) is None
    assert empty.share_at_most(1.0) is None
