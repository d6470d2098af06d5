"""What can be seen of the engine from outside: whose turn came, where the time went, what waits."""

from __future__ import annotations

import threading

import pytest
from tests.plans import Draw, Row, plan_of

from headrace.backends.cpu.runner import CpuRunner
from headrace.backends.reference.runner import ReferenceRunner
from headrace.core.clock import VirtualClock
from headrace.core.config import SchedulerConfig
from headrace.core.errors import HeadraceError
from headrace.core.request import (
    BeamParams,
    FinishReason,
    GenerateRequest,
    SampledToken,
    SamplingParams,
    Started,
)
from headrace.core.step import RunnerLimits
from headrace.engine import starting
from headrace.engine.loop import Engine
from headrace.models.decoder import DecoderWeights
from headrace.models.spec import ModelSpec
from headrace.simulate.cost import linear_cost
from headrace.simulate.runner import SimulatedRunner
from headrace.weights.weight import Weight

TinyModel = tuple[ModelSpec, DecoderWeights[Weight]]


def make(
    *, max_sequences: int = 8, total_blocks: int = 64, steps_in_flight: int = 1
) -> tuple[Engine, VirtualClock]:
    """A step takes a second."""
    limits = RunnerLimits(
        max_batch_tokens=16,
        max_sequences=max_sequences,
        total_blocks=total_blocks,
        block_tokens=4,
        context_tokens=64,
        steps_in_flight=steps_in_flight,
    )
    clock = VirtualClock()
    runner = SimulatedRunner(
        limits, cost=linear_cost(1.0, 0.0), clock=clock, vocab_size=100, strict=True
    )
    config = SchedulerConfig(debug_invariants=True, watermark=0.0)
    return Engine(runner, frozenset(), config, clock), clock


def asking(name: str, prompt: int = 5, **fields: object) -> GenerateRequest:
    params = fields.pop("params", SamplingParams(temperature=0.0, max_tokens=4))
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=list(range(prompt)),
        params=params,  # type: ignore[arg-type]
        **fields,  # type: ignore[arg-type]
    )


def run(engine: Engine) -> tuple[list[SampledToken], list[Started]]:
    tokens: list[SampledToken] = []
    started: list[Started] = []
    for _ in range(500):
        if not engine.has_work:
            return tokens, started
        tokens += engine.step()
        started += engine.take_started()
    raise AssertionError("still at work")


def test_each_request_starts_once_after_it_waited() -> None:
    engine, _ = make(max_sequences=1)
    for name in "abc":
        engine.add(asking(name))
    _, started = run(engine)
    # Four steps each, one after the other; all of a prompt's blocks but the last are known by then.
    assert started == [
        Started(request_id="a", waited_s=0.0, cached_tokens=0),
        Started(request_id="b", waited_s=4.0, cached_tokens=4),
        Started(request_id="c", waited_s=8.0, cached_tokens=4),
    ]
    assert engine.take_started() == []


def test_neither_forks_nor_beams_nor_preemption_start_a_request_again() -> None:
    engine, _ = make(total_blocks=9, steps_in_flight=2)
    engine.add(asking("short", params=SamplingParams(max_tokens=1, n=64)))
    run(engine)
    for number in range(3):
        params = SamplingParams(temperature=1.0, seed=number, max_tokens=14, n=2)
        engine.add(asking(f"n{number}", params=params))
    engine.add(asking("beams", beam=BeamParams(beam_width=3, max_tokens=3)))
    tokens, started = run(engine)
    assert engine.stats.preemptions > 0
    assert sorted(s.request_id for s in started) == ["beams", "n0", "n1", "n2"]
    assert {t.request_id for t in tokens} == {"beams", "n0", "n1", "n2"}


def test_what_expires_in_the_queue_never_started() -> None:
    engine, clock = make(max_sequences=1)
    engine.add(asking("long", params=SamplingParams(temperature=0.0, max_tokens=20)))
    engine.add(asking("late", timeout_s=3.0))
    tokens, started = run(engine)
    assert [s.request_id for s in started] == ["long"]
    (late,) = [t for t in tokens if t.request_id == "late"]
    assert (late.token_id, late.finish_reason) == (-1, FinishReason.TIMEOUT)
    engine.add(asking("begun", params=SamplingParams(max_tokens=30), timeout_s=3.0))
    tokens, started = run(engine)
    assert [s.request_id for s in started] == ["begun"]
    assert tokens[-1].finish_reason is FinishReason.TIMEOUT
    assert clock.now_s() > 20


def test_starts_that_nobody_asks_for_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "STARTED_KEPT", 3)
    engine, _ = make()
    for number in range(8):
        engine.add(asking(str(number), params=SamplingParams(max_tokens=1)))
        while engine.has_work:
            engine.step()
    assert [s.request_id for s in engine.take_started()] == ["5", "6", "7"]


def test_what_runs_and_what_waits_is_counted() -> None:
    engine, _ = make(max_sequences=2)
    stats = engine.stats
    for number in range(5):
        engine.add(asking(str(number), prompt=3 + number))
    assert (stats.running_sequences, stats.waiting_sequences) == (0, 5)
    assert stats.waiting_prompt_tokens == 3 + 4 + 5 + 6 + 7
    engine.step()
    assert (stats.running_sequences, stats.waiting_sequences) == (2, 3)
    assert stats.waiting_prompt_tokens == 5 + 6 + 7
    engine.cancel("3")
    assert (stats.waiting_sequences, stats.waiting_prompt_tokens) == (2, 5 + 7)
    run(engine)
    assert (stats.running_sequences, stats.waiting_sequences) == (0, 0)
    assert stats.waiting_prompt_tokens == 0


def test_time_is_split_by_the_engines_own_clock() -> None:
    engine, clock = make()
    engine.add(asking("a"))
    run(engine)
    stats = engine.stats
    assert stats.compute_s == clock.now_s() == stats.steps
    assert (stats.schedule_s, stats.sample_s, stats.commit_s) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("kind", [CpuRunner, ReferenceRunner])
def test_time_is_split_by_the_wall(
    tiny_model: TinyModel, kind: type[CpuRunner] | type[ReferenceRunner]
) -> None:
    spec, weights = tiny_model
    runner = kind(spec, weights, total_blocks=8, max_batch_tokens=16)
    entry = Row(sequence_id=1, token_ids=[5] * 8, start=0, block_table=[0])
    runner.submit(plan_of(entry))
    assert runner.collect().sample_s == 0.0  # nothing was drawn
    entry.draw = Draw(temperature=1.0)
    runner.submit(plan_of(entry))
    drawn = runner.collect()
    assert 0 < drawn.sample_s < drawn.compute_s
    engine = Engine(runner, frozenset())
    engine.add(asking("a"))
    run(engine)
    stats = engine.stats
    assert min(stats.schedule_s, stats.compute_s, stats.sample_s, stats.commit_s) > 0


def test_progress_moves_within_an_instruction(tiny_model: TinyModel) -> None:
    """The same instructions over more rows count for more: one over thousands takes seconds."""
    spec, weights = tiny_model
    runner = CpuRunner(spec, weights, total_blocks=8, max_batch_tokens=128)

    def moved(rows: int) -> int:
        before = runner.progress
        entry = Row(sequence_id=1, token_ids=[5] * rows, start=0, block_table=list(range(8)))
        runner.submit(plan_of(entry))
        runner.collect()
        return runner.progress - before

    assert moved(120) >= moved(1) + 2 * len(spec.attention)


@pytest.mark.parametrize("kind", [CpuRunner, ReferenceRunner])
def test_progress_moves_within_a_step(
    tiny_model: TinyModel, kind: type[CpuRunner] | type[ReferenceRunner]
) -> None:
    """Several times a layer; read from beside while steps run, it never goes back."""
    spec, weights = tiny_model
    runner = kind(spec, weights, total_blocks=8, max_batch_tokens=128)
    before = runner.progress
    plan = plan_of(Row(sequence_id=1, token_ids=[5] * 120, start=0, block_table=list(range(8))))
    seen: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(runner.progress)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        runner.submit(plan)
        runner.collect()
        once = runner.progress - before
        runner.submit(plan)
        runner.collect()
    finally:
        done.set()
        watcher.join()
    assert once >= 5 * len(spec.attention)
    assert runner.progress - before == 2 * once
    assert seen == sorted(seen)
    assert Engine(runner, frozenset()).progress == runner.progress


def test_an_idle_engine_holds_no_block() -> None:
    engine, _ = make()
    engine.add(asking("a"))
    engine.step()
    engine.idle_check()  # at work: nothing to say
    run(engine)
    engine.idle_check()
    engine.blocks.take()
    with pytest.raises(HeadraceError, match="1 of 64 blocks in use"):
        engine.idle_check()
