"""Blocks from elsewhere change no answer: whatever is adopted, when, and how much of it fits.

On the simulated runner, which refuses to move blocks that a plan in flight needs, with the
workloads of test_properties.py.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engine.test_properties import (
    EOS,
    FAMILIES,
    ROOMY,
    Setting,
    Walk,
    assert_same,
    engine_settings,
    make,
    solo,
    tight_settings,
    tight_workloads,
    workloads,
)

from headrace.core.clock import VirtualClock
from headrace.core.config import SchedulerConfig
from headrace.core.request import GenerateRequest, SamplingParams
from headrace.core.step import MovesBlocks, RunnerLimits
from headrace.engine.blocks import BlockPool
from headrace.engine.loop import Engine
from headrace.engine.prefix import block_keys
from headrace.simulate.cost import linear_cost
from headrace.simulate.drive import Arrival, drive
from headrace.simulate.lean import LeanRunner
from headrace.simulate.runner import SimulatedRunner

LIMITS = RunnerLimits(
    max_batch_tokens=64, max_sequences=4, total_blocks=16, block_tokens=4, context_tokens=64
)
PROMPT = FAMILIES[0][:22]
KEYS = block_keys(PROMPT, "", 4)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable()
    Walk.live = 0
    yield
    logging.disable(logging.NOTSET)


def engine_of(
    limits: RunnerLimits = LIMITS, *, prefix_cache: bool = True
) -> tuple[Engine, VirtualClock]:
    return make(Setting(limits=limits, config=SchedulerConfig(prefix_cache=prefix_cache)))


def ask(engine: Engine, prompt: list[int], name: str = "r", salt: str = "") -> Arrival:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    request = GenerateRequest(
        request_id=name, prompt_token_ids=prompt, params=params, cache_salt=salt
    )
    engine.add(request)
    return Arrival(request=request)


def run(engine: Engine) -> list[int]:
    found = []
    while engine.has_work:
        found += [token.token_id for token in engine.step()]
        engine.check_integrity()
    return found


def computed(prompt: list[int], limits: RunnerLimits = LIMITS) -> dict[bytes, bytes]:
    """The contents of a prompt's full blocks, as another engine computed them."""
    engine, _ = engine_of(limits)
    ask(engine, prompt)
    run(engine)
    keys = block_keys(prompt, "", limits.block_tokens)
    found = engine.read_cached(keys)
    assert [key for key, _ in found] == keys
    return {key: bytes(copy) for key, copy in found}


def test_what_one_engine_computed_another_need_not_compute() -> None:
    contents = computed(PROMPT)
    plain, _ = engine_of()
    ask(plain, PROMPT)
    expected = run(plain)
    engine, _ = engine_of()
    assert engine.adopt(KEYS, contents) == 5
    assert (engine.blocks.cached_blocks, engine.blocks.used_blocks) == (5, 0)
    ask(engine, PROMPT)
    engine.step()
    (started,) = engine.take_started()
    assert started.cached_tokens == 20
    again, _ = engine_of()
    assert again.adopt(KEYS, contents) == 5
    ask(again, PROMPT)
    assert run(again) == expected
    assert again.stats.prompt_tokens == 2
    assert again.stats.prefix_hits_tokens == 20


def test_a_chain_is_adopted_up_to_its_first_gap() -> None:
    contents = computed(PROMPT)
    engine, _ = engine_of()
    assert engine.adopt(KEYS, {k: c for k, c in contents.items() if k != KEYS[2]}) == 2
    assert engine.blocks.cached_blocks == 2
    assert engine.adopt(KEYS, {KEYS[2]: contents[KEYS[2]][:-1]}) == 2  # not a block's size
    assert engine.adopt(KEYS, {KEYS[2]: contents[KEYS[2]]}) == 3
    assert engine.adopt(KEYS[::-1], contents) == 5  # which order, the caller vouches for
    engine.check_integrity()
    assert engine.read_cached([b"?", *KEYS]) == []


def test_nobody_gives_way_to_adopted_blocks() -> None:
    """Blocks in use are not taken, cached ones are, and none that the same text needs."""
    contents = computed(PROMPT)
    engine, _ = engine_of(replace(LIMITS, total_blocks=7))
    ask(engine, [3] * 11, "busy")
    engine.step()
    assert engine.blocks.used_blocks == 3
    assert engine.adopt(KEYS, contents) == 4  # of 5: all that is left
    engine.check_integrity()
    assert engine.stats.preemptions == 0
    run(engine)
    assert engine.adopt(KEYS, contents) == 5
    assert [key for key, _ in engine.read_cached(KEYS)] == KEYS


def test_a_block_that_a_step_in_flight_still_writes_is_not_taken() -> None:
    """A request is cancelled while its step is computed: its blocks are free at once, and must not
    be written from outside before that step has ended."""
    contents = computed(PROMPT)
    limits = replace(LIMITS, total_blocks=6, steps_in_flight=2)
    engine, _ = engine_of(limits)
    ask(engine, [3] * 15, "cancelled")
    engine.step()
    engine.cancel("cancelled")
    assert engine.blocks.free_blocks == 6
    assert engine.adopt(KEYS, contents) == 2  # the other four are being written
    while engine.has_work:
        engine.step()
    assert engine.adopt(KEYS, contents) == 5


def test_a_failed_write_leaves_nothing_findable() -> None:
    contents = computed(PROMPT)
    contents[KEYS[1]] = b"?" * len(contents[KEYS[1]])
    clock = VirtualClock()

    class Failing(SimulatedRunner):
        def write_blocks(self, *_: object) -> None:
            raise OSError("the device is gone")

    engine = Engine(
        Failing(LIMITS, cost=linear_cost(1.0, 0.01), clock=clock), frozenset({EOS}), clock=clock
    )
    with pytest.raises(OSError, match="gone"):
        engine.adopt(KEYS, contents)
    assert engine.blocks.free_blocks == LIMITS.total_blocks
    engine.check_integrity()


def test_engines_that_move_no_blocks_say_so() -> None:
    contents = computed(PROMPT)
    off, _ = engine_of(prefix_cache=False)
    clock = VirtualClock()
    lean = Engine(
        LeanRunner(LIMITS, cost=linear_cost(1.0, 0.01), clock=clock), frozenset(), clock=clock
    )
    for engine in (off, lean):
        assert engine.moves is None
        assert engine.adopt(KEYS, contents) == 0
        assert engine.read_cached(KEYS) == []
        assert engine.blocks.free_blocks == LIMITS.total_blocks
    assert isinstance(engine_of()[0].moves, MovesBlocks)


def test_take_outside_evicts_in_order_and_spares_the_busy() -> None:
    pool = BlockPool(4, 2)
    blocks = [pool.take() for _ in range(4)]
    for block in blocks[:3]:
        pool.publish(block, bytes([block]))
    pool.give_back(blocks[:3])  # the last one is evicted first
    assert pool.take_outside({2}) == 1
    assert pool.was_evicted(bytes([1]))
    assert pool.take_outside({2, 0}) is None
    assert pool.take_outside({0}) == 2
    pool.check_integrity([[3, 1, 2]])


# -- under load --------------------------------------------------------------------------------

under_load = settings(
    max_examples=int(os.environ.get("HEADRACE_TEST_EXAMPLES", "15")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def check_adopting(setting: Setting, arrivals: list[Arrival], every: int, most: int) -> None:
    """Every so many steps a family's blocks, as a roomy engine has them, are offered for adoption,
    up to `most` of them."""
    size = setting.limits.block_tokens
    roomy = RunnerLimits(
        max_batch_tokens=4096,
        max_sequences=64,
        total_blocks=1024,
        block_tokens=size,
        context_tokens=ROOMY.context_tokens,
    )
    offers = []
    for family in FAMILIES:
        contents = computed(family, roomy)
        offers.append((block_keys(family, "", size), dict(list(contents.items())[:most])))
    engine, clock = make(setting)
    steps = 0

    def offer() -> None:
        nonlocal steps
        steps += 1
        engine.check_integrity()
        if steps % every == 0:
            keys, contents = offers[steps // every % len(offers)]
            held = engine.blocks.used_blocks
            had = len(engine.read_cached(keys))
            count = engine.adopt(keys, contents)
            assert engine.blocks.used_blocks == held
            assert engine.moves is None or count >= min(had, len(keys))
            for key, copy in engine.read_cached(keys):
                assert bytes(copy) == contents.get(key, copy)
            engine.check_integrity()

    outcomes = list(drive(engine, clock, arrivals, max_idle_steps=3000, after_step=offer))
    assert len(outcomes) == len(arrivals)
    for outcome in outcomes:
        if outcome.refused is None:
            assert_same(outcome, solo(outcome.arrival.request))
    assert engine.blocks.used_blocks == 0


@under_load
@given(engine_settings(), workloads(beams=True), st.integers(1, 4), st.integers(1, 20))
def test_no_request_can_tell_what_was_adopted(
    setting: Setting, arrivals: list[Arrival], every: int, most: int
) -> None:
    check_adopting(setting, arrivals, every, most)


@under_load
@given(tight_settings(), tight_workloads(), st.integers(1, 4), st.integers(1, 20))
def test_nor_where_blocks_are_scarce(
    setting: Setting, arrivals: list[Arrival], every: int, most: int
) -> None:
    check_adopting(setting, arrivals, every, most)
