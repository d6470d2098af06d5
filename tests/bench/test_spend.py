from __future__ import annotations

import pytest
from tests.bench.test_summary import failed, whole

from headrace.bench.spend import Purse
from headrace.client.answer import Failure
from headrace.core.errors import ConfigError
from headrace.hardware.api_prices import parse_api
from headrace.workload.ask import Ask


def test_a_limit_holds_whatever_comes_back() -> None:
    """1 USD a million in, 10 out: 90 + 10 * 5 = 140 millionths asked, 100 + 50 spent."""
    purse = Purse(parse_api("mine=1/10"), 450e-6)
    one = whole(0.0)
    ask = Ask(at_s=0.0, prompt_tokens=90, output_tokens=5)
    assert [purse.may_send(ask) for _ in range(4)] == [True, True, True, False]
    purse.settle(one)
    assert purse.spent_usd == pytest.approx(150e-6)
    assert not purse.may_send(ask)  # 150 spent, 280 on their way, 140 more are too much
    purse.settle(failed(0.0, Failure.RESET))
    assert purse.spent_usd == pytest.approx(240e-6)  # its prompt may have been charged


def test_cached_input_costs_less() -> None:
    purse = Purse(parse_api("mine=1/10/0.1"), 1.0)
    one = whole(0.0)
    one.answer.cached_tokens = 60
    purse.may_send(one.ask)
    purse.settle(one)
    assert purse.spent_usd == pytest.approx((40 + 6 + 50) / 1e6)


def test_a_limit_below_the_questions_before_a_run_is_refused() -> None:
    Purse(parse_api("mine=1/10"), 0.01).check_questions()
    with pytest.raises(ConfigError, match="the questions before a run alone"):
        Purse(parse_api("mine=1/10"), 0.001).check_questions()
