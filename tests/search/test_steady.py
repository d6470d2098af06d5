"""The steady state against arithmetic by hand, and its bound against random schedules."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.search.steady import Batch, Demand, Limits, about_requests, most_requests

DEMAND = Demand(
    prompt_tokens=512,
    decode_tokens=299,
    decode_context_tokens=662,
    prefill_context_tokens=256,
    held_tokens=662,
)
LIMITS = Limits(sequences=256, batch_tokens=8192, kv_tokens=10**9)


def step_s(batch: Batch) -> float:
    """A small roofline: 10 ms of weights, or 20 us a token; and 1 us a thousand tokens of KV."""
    rows = batch.decodes + batch.prefill_tokens
    return max(0.010, 20e-6 * rows) + 1e-9 * batch.decodes * batch.decode_context_tokens


def test_by_hand() -> None:
    best = most_requests(DEMAND, LIMITS, step_s)
    assert best is not None
    q = 256 / 299
    length_s = max(0.010, 20e-6 * (256 + 512 * q)) + 1e-9 * 256 * 662
    assert best.decodes == pytest.approx(256)
    assert best.requests_s == pytest.approx(q / length_s)
    assert best.limit == "sequences"


def test_the_time_per_token_limits_the_batch() -> None:
    best = most_requests(DEMAND, replace(LIMITS, tpot_s=0.012), step_s)
    assert best is not None
    assert best.limit == "tpot"
    assert best.step_s == pytest.approx(0.012, rel=0.01)


def test_kv_limits_the_batch() -> None:
    best = most_requests(DEMAND, replace(LIMITS, kv_tokens=6620), step_s)
    assert best is not None
    assert (best.limit, round(best.decodes)) == ("kv", 10)
    assert most_requests(DEMAND, replace(LIMITS, kv_tokens=600), step_s) is None


def test_a_step_longer_than_the_time_per_token_serves_nothing() -> None:
    assert most_requests(DEMAND, replace(LIMITS, tpot_s=0.005), step_s) is None


def test_prompts_without_answers() -> None:
    best = most_requests(replace(DEMAND, decode_tokens=0), LIMITS, step_s)
    assert best is not None
    assert best.requests_s == pytest.approx(1 / (512 * 20e-6))


@given(
    prompt=st.floats(1, 5000),
    output=st.floats(0, 2000),
    sequences=st.integers(1, 512),
    tpot_s=st.none() | st.floats(0.011, 0.2),
)
def test_the_estimate_is_never_above_the_bound(
    prompt: float, output: float, sequences: int, tpot_s: float | None
) -> None:
    demand = replace(DEMAND, prompt_tokens=prompt, decode_tokens=output)
    limits = replace(LIMITS, sequences=sequences, tpot_s=tpot_s)
    bound = most_requests(demand, limits, step_s)
    about = about_requests(demand, limits, step_s)
    assert (bound is None) == (about is None)
    if bound is not None and about is not None:
        assert about.requests_s <= bound.requests_s * 1.01


@given(seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_no_schedule_beats_the_bound(seed: int) -> None:
    """Runs a closed loop of requests with random chunks; its rate stays below the bound."""
    random_ = random.Random(seed)
    users = random_.randint(1, 200)
    demand = replace(DEMAND, prompt_tokens=300, decode_tokens=20)
    bound = most_requests(demand, LIMITS, step_s)
    assert bound is not None
    waiting, now_s, ended = [300] * users, 0.0, 0
    answering: list[int] = []
    for _ in range(400):
        room = random_.randint(64, 4096)
        rows, decodes = 0, len(answering)
        answering = [left - 1 for left in answering]
        while waiting and rows < room:
            chunk = min(waiting[0], room - rows)
            rows += chunk
            waiting[0] -= chunk
            if waiting[0] == 0:
                waiting.pop(0)
                answering.append(20)
        batch = Batch(decodes=decodes, decode_context_tokens=662, prefill_tokens=rows)
        now_s += step_s(batch)
        done = answering.count(0)
        ended += done
        answering = [left for left in answering if left > 0]
        waiting += [300] * done
    assert ended / now_s <= bound.requests_s * 1.05  # the first wave was not yet steady
