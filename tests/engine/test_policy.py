"""Who goes first, and how much of a prompt fits beside decoding: values in, values out."""

from __future__ import annotations

from itertools import pairwise

import pytest

from headrace.core.config import Policy, SchedulerConfig
from headrace.engine.policy import StepTimes, admission_key, victim_key

DECODE_S, TOKEN_S = 0.010, 0.001


def drive(times: StepTimes, steps: int, *, token_s: float = TOKEN_S) -> list[int]:
    """Steps in which others decode and a prompt is always waiting; the chunks it got."""
    chunks = []
    for _ in range(steps):
        chunk = times.prompt_tokens(512, 8, 1)
        times.learn(DECODE_S + chunk * token_s, 8, chunk)
        chunks.append(chunk)
    return chunks


def test_chunks_settle_where_a_step_takes_twice_as_long() -> None:
    chunks = drive(StepTimes(2.0, 16), 40)
    assert chunks[0] == 0  # the measure is taken first
    assert chunks[1] == 16
    assert set(chunks[10:]) == {10}  # 10 ms of prompt tokens beside 10 ms of decoding


def test_chunks_follow_what_a_token_costs() -> None:
    times = StepTimes(2.0, 16)
    drive(times, 20)
    assert drive(times, 40, token_s=TOKEN_S * 20)[-1] == 1
    assert drive(times, 60, token_s=TOKEN_S)[-1] == 10


def test_the_measure_is_taken_again_while_prompts_never_cease() -> None:
    chunks = drive(StepTimes(2.0, 16), 300)
    pauses = [at for at, chunk in enumerate(chunks) if chunk == 0]
    assert pauses == [0, 65, 130, 195, 260]


def test_one_wrong_measure_does_not_let_in_a_huge_chunk() -> None:
    """A decoding step that a neighbour made slow makes prompt tokens look free."""
    times = StepTimes(2.0, 16)
    drive(times, 20)
    times.learn(2.0, 8, 0)
    chunks = drive(times, 6)
    assert chunks[0] <= 20
    assert all(after <= 2 * before for before, after in pairwise(chunks))


def test_steps_without_decoding_teach_nothing_and_budgets_hold() -> None:
    times = StepTimes(2.0, 16)
    times.learn(5.0, 0, 512)
    assert times.prompt_tokens(512, 8, 1) == 0
    times.learn(DECODE_S, 4, 0)
    assert times.prompt_tokens(3, 4, 1) == 3
    assert times.prompt_tokens(0, 4, 1) == 0


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        (Policy.FCFS, ["long", "urgent", "short", "late"]),
        (Policy.PRIORITY, ["urgent", "long", "short", "late"]),
        (Policy.SHORTEST, ["short", "urgent", "late", "long"]),
    ],
)
def test_policies_order_the_queue(policy: Policy, order: list[str]) -> None:
    config = SchedulerConfig(policy=policy, ageing_tokens_per_s=100.0)
    requests = {  # name: priority, prompt tokens, arrival, order
        "long": (0, 5000, 0.0, 0),
        "urgent": (-5, 300, 1.0, 1),
        "short": (0, 10, 2.0, 2),
        "late": (0, 10, 20.0, 3),
    }
    keys = {
        name: admission_key(config, priority=p, prompt_tokens=n, arrival_s=t, order=at)
        for name, (p, n, t, at) in requests.items()
    }
    assert sorted(keys, key=lambda name: keys[name]) == order


def test_shortest_first_starves_nobody() -> None:
    """A long prompt goes before any short one that came late enough."""
    config = SchedulerConfig(policy=Policy.SHORTEST, ageing_tokens_per_s=100.0)
    long = admission_key(config, priority=0, prompt_tokens=8000, arrival_s=0.0, order=0)
    late = admission_key(config, priority=0, prompt_tokens=1, arrival_s=80.1, order=1)
    assert long < late


def test_the_victim_is_the_newest_of_the_lowest_priority() -> None:
    victims = [(0, 5), (3, 1), (3, 4), (-1, 9)]
    assert max(victims, key=lambda v: victim_key(priority=v[0], order=v[1])) == (3, 4)


def test_few_that_decode_do_not_hold_up_many_that_wait() -> None:
    times = StepTimes(2.0, 16)
    for _ in range(40):
        chunk = times.prompt_tokens(512, 2, 14)
        times.learn(DECODE_S + chunk * TOKEN_S, 2, chunk)
    assert chunk == 70  # seven prompts for each that decodes


def test_the_measure_is_taken_again_when_many_more_decode() -> None:
    times = StepTimes(2.0, 16)
    drive(times, 20)
    assert times.prompt_tokens(512, 16, 1) > 0
    assert times.prompt_tokens(512, 17, 1) == 0
    times.learn(4 * DECODE_S, 17, 0)
    assert times.prompt_tokens(512, 17, 1) > 10
