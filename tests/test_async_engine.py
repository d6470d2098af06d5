"""Many callers at once, on the default model: the same answers as alone, nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import LLM, AsyncEngine, SamplingParams
from headrace.core.errors import ContextLengthError, HeadraceError, InvalidRequestError
from headrace.core.request import FinishReason, TokenEvent


@pytest.fixture(scope="module")
def engine(default_model_path: Path) -> Iterator[AsyncEngine]:
    with AsyncEngine(default_model_path, context_tokens=1024, debug_invariants=True) as made:
        yield made


async def collect(engine: AsyncEngine, prompt: str, **more: object) -> list[TokenEvent]:
    return [event async for event in engine.generate(prompt, **more)]  # type: ignore[arg-type]


def wait_until_idle(engine: AsyncEngine) -> None:
    deadline = time.monotonic() + 20
    loop = engine._loop
    while loop.engine.has_work or loop.callers or loop.inbox:
        assert time.monotonic() < deadline, "the engine does not come to rest"
        time.sleep(0.005)
    assert loop.engine.blocks.used_blocks == 0


def test_many_callers_get_what_each_would_get_alone(
    engine: AsyncEngine, default_model_path: Path
) -> None:
    prompts = ["def fib(n):", "The moon", "Red, green,", "Once upon a time", "1 2 3 4", "Paris is"]
    params = [
        SamplingParams(temperature=t, seed=i, max_tokens=10 + 5 * i)
        for i, t in enumerate((0.0, 0.8, 1.0, 0.0, 1.2, 0.5))
    ]

    async def all_at_once() -> list[list[TokenEvent]]:
        return await asyncio.gather(
            *(collect(engine, p, params=q) for p, q in zip(prompts, params, strict=True))
        )

    together = asyncio.run(all_at_once())
    with LLM(default_model_path, context_tokens=1024) as llm:
        for prompt, param, events in zip(prompts, params, together, strict=True):
            (alone,) = llm.generate(prompt, param)[0].outputs
            assert [e.token_id for e in events] == alone.token_ids
            assert "".join(e.text for e in events) == alone.text
            assert sum(e.logprob for e in events) == alone.cumulative_logprob
            assert events[-1].finish_reason is not None
    wait_until_idle(engine)


def test_leaving_early_ends_the_request(engine: AsyncEngine) -> None:
    async def leave() -> None:
        events = engine.generate("Tell me a story.", SamplingParams(max_tokens=500))
        async for _ in events:
            break
        await events.aclose()  # type: ignore[attr-defined]
        # Drawn at random, an answer may be over at once: this one must not be.
        endless = SamplingParams(max_tokens=900, ignore_eos=True)
        task = asyncio.create_task(collect(engine, "Go on.", params=endless))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    wait_until_idle(engine)


def test_a_stop_string_ends_the_work(engine: AsyncEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=400, stop=["\n"])
    events = asyncio.run(collect(engine, "def fib(n):\n    if n == 0:", params=params))
    assert "\n" not in "".join(e.text for e in events)
    assert events[-1].finish_reason is FinishReason.STOP
    wait_until_idle(engine)


def test_a_timeout_ends_a_request_wherever_it_is(engine: AsyncEngine) -> None:
    params = SamplingParams(max_tokens=900, ignore_eos=True)
    events = asyncio.run(collect(engine, "Go on and on.", params=params, timeout_s=0.05))
    assert events[-1].finish_reason is FinishReason.TIMEOUT
    assert events[-1].token_id is None
    wait_until_idle(engine)


def test_several_continuations_come_interleaved(engine: AsyncEngine) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=8, ignore_eos=True)
    events = asyncio.run(collect(engine, "My favourite animal is", params=params))
    for index in range(3):
        own = [e for e in events if e.index == index]
        assert len(own) == 8
        assert own[-1].finish_reason is FinishReason.LENGTH
    assert len({tuple(e.token_id for e in events if e.index == i) for i in range(3)}) > 1
    wait_until_idle(engine)


def test_a_refused_request_harms_no_other(engine: AsyncEngine) -> None:
    async def several() -> None:
        good = asyncio.create_task(
            collect(engine, "Hi", params=SamplingParams(max_tokens=60), request_id="mine")
        )
        await asyncio.sleep(0.01)
        with pytest.raises(InvalidRequestError, match="'mine' is in use"):
            await collect(engine, "Hi", request_id="mine")
        with pytest.raises(ContextLengthError, match="1024"):
            await collect(engine, "x " * 3000)
        assert (await good)[-1].finish_reason is not None

    asyncio.run(several())
    wait_until_idle(engine)


def test_closing_fails_what_is_running(default_model_path: Path) -> None:
    engine = AsyncEngine(default_model_path, context_tokens=512)

    async def interrupted() -> None:
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        task = asyncio.create_task(collect(engine, "Go on.", params=params))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(engine.close)
        with pytest.raises(HeadraceError, match="closed"):
            await task

    asyncio.run(interrupted())


def test_a_closed_engine_says_so(default_model_path: Path) -> None:
    engine = AsyncEngine(default_model_path, context_tokens=256)
    engine.close()
    engine.close()
    with pytest.raises(HeadraceError, match="closed"):
        asyncio.run(collect(engine, "Go on."))


def test_it_is_a_context_of_asyncio_too(default_model_path: Path) -> None:
    async def within() -> list[TokenEvent]:
        async with AsyncEngine(default_model_path, context_tokens=256) as engine:
            return await collect(engine, "1 2 3", params=SamplingParams(max_tokens=2))

    assert len(asyncio.run(within())) == 2


def test_one_that_nobody_holds_ends_its_thread(default_model_path: Path) -> None:
    engine = AsyncEngine(default_model_path, context_tokens=256)
    thread, runner = engine._loop._thread, weakref.ref(engine._assembled.runner)
    del engine
    gc.collect()
    assert not thread.is_alive()
    assert runner() is None


def test_a_loop_that_fails_tells_its_callers(
    default_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with AsyncEngine(default_model_path, context_tokens=256) as engine:
        monkeypatch.setattr(engine._loop.engine, "step", lambda: 1 // 0)
        with pytest.raises(HeadraceError, match="ZeroDivisionError"):
            asyncio.run(collect(engine, "Go on."))
        with pytest.raises(HeadraceError, match="ZeroDivisionError"):
            asyncio.run(collect(engine, "And on."))
