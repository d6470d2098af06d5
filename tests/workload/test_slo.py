"""Objectives as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import ConfigError
from headrace.workload.slo import Slo, parse_slo

times = st.none() | st.floats(1e-4, 1e4)


def test_written_forms() -> None:
    assert parse_slo("ttft=500ms,tpot=50ms") == Slo(ttft_s=0.5, tpot_s=0.05)
    assert parse_slo(" TTFT = 2 s , e2e=1min, share=95% ") == Slo(ttft_s=2, e2e_s=60, share=0.95)
    assert parse_slo("tpot=.5s,share=0.9") == Slo(tpot_s=0.5, share=0.9)


@given(times, times, times, st.floats(0.01, 1))
def test_what_is_shown_is_read_again(
    ttft_s: float | None, tpot_s: float | None, e2e_s: float | None, share: float
) -> None:
    slo = Slo(ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=e2e_s, share=share)
    if (ttft_s, tpot_s, e2e_s) == (None, None, None):
        return
    again = parse_slo(str(slo))
    for name in ("ttft_s", "tpot_s", "e2e_s", "share"):
        found, expected = getattr(again, name), getattr(slo, name)
        assert (found is None) == (expected is None)
        assert expected is None or found == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ttft=500", "without a unit.*500ms"),
        ("", "at least one of"),
        ("share=99%", "at least one of"),
        ("ttft", "such as"),
        ("itl=5ms", "such as"),
        ("ttft=5parsecs", "a time such as"),
        ("ttft=-5ms", "a time such as"),
        ("ttft=0ms", "above 0"),
        ("ttft=5ms,ttft=6ms", "twice"),
        ("ttft=5ms,share=120%", "such as 99%"),
        ("ttft=5ms,share=0", "such as 99%"),
        ("ttft=5ms,share=most", "such as 99%"),
    ],
)
def test_bad_objectives_are_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_slo(text)


def test_a_request_meets_it_or_not() -> None:
    slo = Slo(ttft_s=0.5, tpot_s=0.05)
    assert slo.is_met_by(ttft_s=0.5, tpot_s=0.05, e2e_s=99.0)
    assert not slo.is_met_by(ttft_s=0.51, tpot_s=0.01, e2e_s=0.6)
    assert not slo.is_met_by(ttft_s=0.1, tpot_s=0.06, e2e_s=0.6)
    assert not Slo(e2e_s=1.0).is_met_by(ttft_s=0.1, tpot_s=0.06, e2e_s=1.6)
