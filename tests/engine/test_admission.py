"""How many sequences may run at one time: what several of them share is there once."""

from __future__ import annotations

import pytest

from headrace.core.clock import VirtualClock
from headrace.core.config import SchedulerConfig
from headrace.core.request import GenerateRequest, SamplingParams
from headrace.core.step import RunnerLimits
from headrace.engine.admission import SharedBlocks
from headrace.engine.blocks import BlockPool
from headrace.engine.loop import Engine
from headrace.simulate.cost import linear_cost
from headrace.simulate.runner import SimulatedRunner

SHARED = list(range(1, 161))  # ten blocks
BLOCKS, ANSWER_TOKENS = 40, 24


def most_at_once(beginning: list[int], *, requests: int = 12) -> tuple[int, int]:
    """Sequences that ran at one time, and preemptions: each prompt is the beginning and six tokens
    of its own. The first request is alone, so that its blocks are cached."""
    clock = VirtualClock()
    limits = RunnerLimits(
        max_batch_tokens=1024,
        max_sequences=64,
        total_blocks=BLOCKS,
        block_tokens=16,
        context_tokens=512,
    )
    runner = SimulatedRunner(
        limits, cost=linear_cost(1.0, 0.01), clock=clock, vocab_size=200, strict=True
    )
    engine = Engine(runner, frozenset(), SchedulerConfig(debug_invariants=True), clock)

    def add(number: int) -> None:
        tokens = [*(beginning or [number + 1] * len(SHARED)), *[170 + number] * 6]
        params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS)
        engine.add(GenerateRequest(request_id=f"r{number}", prompt_token_ids=tokens, params=params))

    most = 0
    add(0)
    while engine.has_work:
        engine.step()
    for number in range(1, requests + 1):
        add(number)
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        most = max(most, engine.stats.running_sequences)
    return most, engine.stats.preemptions


def test_a_beginning_that_all_share_is_counted_once() -> None:
    """40 blocks: 10 that are shared, and room for 15 sequences with 2 of their own. Counted for
    each of them, there was room for three."""
    most, preemptions = most_at_once(SHARED)
    assert most >= 10
    assert preemptions == 0


def test_what_is_not_shared_is_counted_for_each() -> None:
    most, preemptions = most_at_once([])
    assert 2 <= most <= BLOCKS // 11
    assert preemptions == 0


@pytest.mark.parametrize("found", [[], [0, 1]])
def test_held_before(found: list[int]) -> None:
    pool = BlockPool(8, 16)
    one = [pool.take() for _ in range(4)]
    for block in one[:2]:
        pool.share(block)
    two = [*one[:2], pool.take()]
    seen = SharedBlocks(pool, found)
    assert [seen.held_before(each) for each in (one, two, one[:3])] == [0, 2, 2]
