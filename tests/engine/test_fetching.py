"""A store of blocks changes no answer, whatever it has, keeps, loses, delays or refuses.

The store here is a dictionary with bad habits; the engine runs on the simulated runner, with the
workloads of test_properties.py. tests/prefix_disk has the real one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engine.test_properties import (
    EOS,
    EOS_RATE,
    FAMILIES,
    VOCAB,
    Setting,
    Walk,
    assert_ended_well,
    assert_same,
    engine_settings,
    solo,
    tight_settings,
    tight_workloads,
    workloads,
)

from headrace.core.block_store import StoreStats
from headrace.core.clock import VirtualClock
from headrace.core.request import ONCE, GenerateRequest, SamplingParams
from headrace.core.step import Contents, RunnerLimits
from headrace.engine.fetching import LOAD_S
from headrace.engine.loop import Engine
from headrace.simulate.cost import linear_cost
from headrace.simulate.drive import Arrival, drive
from headrace.simulate.runner import SimulatedRunner

LIMITS = RunnerLimits(
    max_batch_tokens=64, max_sequences=4, total_blocks=24, block_tokens=4, context_tokens=64
)
PROMPT = FAMILIES[0][:22]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable()
    Walk.live = 0
    yield
    logging.disable(logging.NOTSET)


class Loading:
    """Ends after it was asked `slow` times; waiting takes virtual time."""

    def __init__(self, found: dict[bytes, bytes], slow: int, clock: VirtualClock) -> None:
        self._found, self._slow, self._clock = found, slow, clock
        self.contents: dict[bytes, Contents] = {}
        self.is_given_up = False

    def wait(self, timeout_s: float) -> bool:
        assert not self.is_given_up
        if self._slow:
            self._slow -= 1
            self._clock.advance(timeout_s)
            return False
        self.contents = dict(self._found)
        return True

    def give_up(self, *, is_late: bool) -> None:
        self.is_given_up = True
        self.contents = dict(list(self._found.items())[:1])  # some had come


class Store:
    """Keeps every `keeps`-th block that it is given, and loads every `loads`-th of what it has."""

    def __init__(self, clock: VirtualClock, slow: int = 0, keeps: int = 1, loads: int = 1) -> None:
        self.stats = StoreStats()
        self.kept: dict[bytes, bytes] = {}
        self.clock, self._slow, self._keeps, self._loads = clock, slow, keeps, loads
        self.asked = 0
        self.loads: list[Loading] = []

    def has(self, key: bytes) -> bool:
        return key in self.kept

    def wants(self, key: bytes) -> bool:
        self.asked += 1
        return key not in self.kept and self.asked % self._keeps == 0

    def keep(self, key: bytes, content: Contents) -> None:
        assert self.kept.setdefault(key, bytes(content)) == bytes(content)

    def use(self, keys: Sequence[bytes]) -> None:
        pass

    def load(self, keys: Sequence[bytes]) -> Loading:
        found = {
            key: self.kept[key] for at, key in enumerate(keys, start=1) if at % self._loads == 0
        }
        if self._loads == 1:
            assert len(found) == len(keys)
        self.loads.append(Loading(found, self._slow, self.clock))
        return self.loads[-1]

    def close(self) -> None:
        pass


def make_engine(store: Store, setting: Setting | None = None) -> Engine:
    limits = LIMITS if setting is None else setting.limits
    runner = SimulatedRunner(
        limits,
        cost=linear_cost(1.0, 0.01),
        clock=store.clock,
        vocab_size=VOCAB,
        eos_id=EOS,
        eos_rate=EOS_RATE,
        strict=True,
    )
    if setting is not None:
        runner.fail(setting.fail)
        for number in setting.raise_on:
            runner.raise_on_step(number)
    config = None if setting is None else setting.config
    return Engine(runner, frozenset({EOS}), config, store.clock, store=store)


def ask(engine: Engine, name: str = "r", prompt: list[int] = PROMPT, salt: str = "") -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    engine.add(
        GenerateRequest(request_id=name, prompt_token_ids=prompt, params=params, cache_salt=salt)
    )


def run(engine: Engine) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for token in engine.step():
            found.setdefault(token.request_id, []).append(token.token_id)
        engine.check_integrity()
    return found


def filled(**habits: int) -> Store:
    """A store with what one engine computed for the prompt."""
    store = Store(VirtualClock(), **habits)
    ask(engine := make_engine(store))
    run(engine)
    return store


def test_the_next_engine_starts_where_the_last_one_ended() -> None:
    store = filled()
    assert len(store.kept) == 6  # 22 + 3 tokens, of which the last is never computed
    ask(engine := make_engine(store))
    assert engine.has_work
    assert engine.stats.waiting_sequences == 0  # it waits for its blocks, not for a place
    first = run(engine)
    (started,) = engine.take_started()
    assert started.cached_tokens == 20
    assert store.stats.hits_tokens == 20
    assert engine.stats.prefix_hits_tokens == 20
    assert engine.stats.prefix_misses == {"too_short": 1, "never_seen": 0, "evicted": 0}
    ask(other := make_engine(Store(VirtualClock())))
    assert first == run(other)
    assert other.stats.prefix_misses["never_seen"] == 1


def test_salts_are_kept_apart_and_what_is_used_once_is_not_kept() -> None:
    store = filled()
    kept = set(store.kept)
    engine = make_engine(store)
    ask(engine, "a", salt="mine")
    assert not store.loads
    run(engine)
    assert len(store.kept) == 2 * len(kept)
    kept = set(store.kept)
    ask(engine, "b", salt=f"{ONCE}0123")
    run(engine)
    assert set(store.kept) == kept


def test_those_who_wait_for_the_same_blocks_load_them_once() -> None:
    store = filled(slow=2)
    engine = make_engine(store)
    for name in "abc":
        ask(engine, name)
    ask(engine, "other", [9] * 5)
    (load,) = store.loads
    tokens = run(engine)
    assert tokens["a"] == tokens["b"] == tokens["c"]
    assert [s.cached_tokens for s in engine.take_started()] == [0, 20, 20, 20]  # it did not wait
    assert not load.is_given_up


def test_nobody_waits_longer_than_allowed() -> None:
    store = filled(slow=10**6)
    ask(engine := make_engine(store))
    began_s = store.clock.now_s()
    while not engine.take_started():
        engine.step()
    assert store.clock.now_s() - began_s <= LOAD_S + 1.5  # and a step of one second
    assert store.loads[0].is_given_up
    assert store.stats.late_loads == 1
    assert store.stats.hits_tokens == 4  # what had come counts
    run(engine)


def test_a_request_may_end_while_it_waits() -> None:
    store = filled(slow=3)
    engine = make_engine(store)
    ask(engine, "a")
    ask(engine, "b")
    engine.cancel("a")
    engine.check_integrity()
    assert run(engine).keys() == {"b"}
    engine = make_engine(store)
    ask(engine, "a")
    engine.cancel("a")
    assert not engine.has_work
    ask(engine, "a")  # the id is free again; the load that nobody waited for is joined
    assert len(run(engine)["a"]) == 3
    params = SamplingParams(max_tokens=2)
    engine = make_engine(slow := filled(slow=10**6))
    engine.add(
        GenerateRequest(request_id="t", prompt_token_ids=PROMPT, params=params, timeout_s=0.5)
    )
    while engine.has_work:
        engine.step()
    assert engine.stats.finished == {"timeout": 1}
    assert slow.stats.late_loads == 0


def test_what_was_dropped_is_kept_when_it_is_used_again() -> None:
    store = Store(VirtualClock(), keeps=10**6)
    engine = make_engine(store)
    ask(engine, "a")
    run(engine)
    assert not store.kept
    store._keeps = 1
    ask(engine, "b")
    assert len(store.kept) == 5
    run(engine)


def test_a_runner_that_fails_to_move_blocks_only_costs_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no")

    store = filled()
    ask(plain := make_engine(Store(VirtualClock())))
    expected = run(plain)
    ask(engine := make_engine(store))
    monkeypatch.setattr(SimulatedRunner, "write_blocks", fail)
    assert run(engine) == expected
    assert store.stats.errors["read"] == 1
    monkeypatch.setattr(SimulatedRunner, "read_blocks", fail)
    ask(engine := make_engine(empty := Store(VirtualClock())))
    assert run(engine) == expected
    assert empty.stats.errors["write"] > 0
    assert not empty.kept


under_load = settings(
    max_examples=int(os.environ.get("HEADRACE_TEST_EXAMPLES", "15")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
habits = st.fixed_dictionaries(
    {
        "slow": st.sampled_from([0, 0, 1, 7, 10**6]),
        "keeps": st.sampled_from([1, 1, 2, 5]),
        "loads": st.sampled_from([1, 1, 2]),
    }
)


def check_stored(setting: Setting, arrivals: list[Arrival], habits: dict[str, int]) -> None:
    """The same requests twice: the second engine finds what the first has left."""
    store = Store(VirtualClock(), **habits)
    for _ in range(2):
        store.clock = VirtualClock()
        engine = make_engine(store, setting)
        outcomes = list(
            drive(
                engine,
                store.clock,
                arrivals,
                max_idle_steps=3000,
                after_step=engine.check_integrity,
            )
        )
        assert len(outcomes) == len(arrivals)
        for outcome in outcomes:
            assert_ended_well(outcome, setting)
            if outcome.refused is None:
                assert_same(outcome, solo(outcome.arrival.request))
        assert engine.blocks.used_blocks == 0
        assert Walk.live == 0


@under_load
@given(engine_settings(), workloads(beams=True), habits)
def test_no_request_can_tell_what_a_store_does(
    setting: Setting, arrivals: list[Arrival], habits: dict[str, int]
) -> None:
    check_stored(setting, arrivals, habits)


@under_load
@given(tight_settings(), tight_workloads(), habits)
def test_nor_where_blocks_are_scarce(
    setting: Setting, arrivals: list[Arrival], habits: dict[str, int]
) -> None:
    check_stored(setting, arrivals, habits)
