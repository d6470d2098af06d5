"""The closed loop against what it must be where that can be said, and against the simulator."""

from __future__ import annotations

import pytest
from tests.simulate.test_roofline import seconds, times_of

from headrace.simulate.closed_loop import Waits, closed_loop_s, loop_of
from headrace.simulate.roofline import StepTimes

LARGE = 1e12


def loop_s(
    times: StepTimes, clients: int, *, room_tokens: float = LARGE, steps: float = 0.0
) -> tuple[float, float]:
    loop = loop_of(
        times,
        input_tokens=1024,
        output_tokens=257,
        clients=clients,
        room_tokens=room_tokens,
        step_tokens=8192,
    )
    return closed_loop_s(times, loop, Waits(steps=steps))


def test_one_client_waits_for_its_prompt_and_is_never_interrupted() -> None:
    times = times_of("llama-3.1-8b", engine="vllm")
    ttft, tpot = loop_s(times, 1)
    assert tpot == pytest.approx(seconds(times, [(1, 1024 + 128)]), rel=1e-3)
    assert seconds(times, [(1024, 0)]) * 0.5 < ttft < seconds(times, [(1024, 0)])


def test_an_answer_is_interrupted_by_each_other_prompt_once() -> None:
    times = times_of("llama-3.1-8b", engine="vllm")
    _, tpot = loop_s(times, 32)
    decoding = [(1, 1024 + 127)] * 32
    step = seconds(times, decoding)
    prompt = seconds(times, [*decoding, (1024, 0)]) - step
    assert tpot == pytest.approx(step + 31 * prompt / 256, rel=0.02)


def test_what_does_not_fit_waits_for_whole_requests() -> None:
    times = times_of("llama-3.1-8b", engine="vllm")
    fits, _ = loop_s(times, 32)
    waits, tpot = loop_s(times, 32, room_tokens=16 * (1024 + 257 / 2))
    assert waits > fits + 0.9 * 256 * tpot


def test_more_clients_wait_longer() -> None:
    times = times_of("gpt-oss-120b", tp=2, engine="trtllm")
    found = [loop_s(times, clients, steps=1.0) for clients in (1, 4, 16, 64, 256)]
    assert found == sorted(found)
    assert [tpot for _, tpot in found] == sorted(tpot for _, tpot in found)
