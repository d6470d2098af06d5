"""What is made of served runs: from answers and counters that are known, without a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from headrace.calibrate import serving
from headrace.calibrate.client import Heard, Server
from headrace.calibrate.serving import AGAIN, OUTPUT, measure_serving, token_s
from headrace.hardware.profile import Serving

PARTS_S = {"schedule": 1e-5, "compute": 0.01, "sample": 1e-3, "commit": 2e-5, "publish": 3e-5}


class Counting:
    """A server whose counters grow by one run of OUTPUT steps each time they were read twice."""

    port = 1

    def __init__(self) -> None:
        self._steps = 0
        self._busy_s = 0.0

    def http_busy_s(self) -> float:
        """Read before and after AGAIN requests."""
        self._busy_s += AGAIN * 2e-4
        return self._busy_s

    def counters(self) -> dict[str, float]:
        self._steps += OUTPUT
        parts = {f"step_seconds {part}": each * self._steps for part, each in PARTS_S.items()}
        return {"steps": float(self._steps), **parts}


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(port: int, prompts: Sequence[Sequence[int]], output: int) -> list[Heard]:
        step_s = 0.011 + 0.001 * len(prompts)
        times = [1.0 + 0.02 + step_s * at for at in range(output)]
        return [
            Heard(sent_s=1.0, first_s=times[0], last_s=times[-1], tokens=output, text_s=times)
            for _ in prompts
        ]

    monkeypatch.setattr(serving, "_ask", answer)
    monkeypatch.setattr(serving, "_round_trip", lambda port: 4e-4)
    monkeypatch.setattr(serving, "BEAT_S", 0.0)


def measured(rounds: int, stop_after: int | None = None, **limits: int) -> Serving | None:
    calls = 0

    def alone(rows: int, context: int) -> float:
        nonlocal calls
        calls += 1
        if stop_after is not None and calls > stop_after:
            raise KeyboardInterrupt
        return 0.010

    return measure_serving(
        cast(Server, Counting()),
        alone,
        vocabulary=range(100),
        max_sequences=limits.get("max_sequences", 20),
        max_prompt=limits.get("max_prompt", 2000),
        block_tokens=16,
        is_over=lambda done: done >= rounds,
    )


def test_streams_are_beside_steps_alone_and_parts_are_means_of_a_step() -> None:
    found = measured(3)
    assert found is not None
    assert [one.streams for one in found.streams] == [1, 4, 16]
    for one in found.streams:
        assert one.token_s == pytest.approx(0.011 + 0.001 * one.streams)
        assert one.alone_s == 0.010
        assert one.added_s == pytest.approx(0.001 + 0.001 * one.streams)
        assert one.repetitions == 3
        assert one.compute_s == pytest.approx(0.011)
        assert one.publish_s == pytest.approx(3e-5)
    assert [one.prompt_tokens for one in found.first_tokens] == [17, 257, 1025]
    assert all(one.ttft_s == pytest.approx(0.02) for one in found.first_tokens)
    assert found.round_trip_s == 4e-4
    assert all(one.busy_s == pytest.approx(2e-4) for one in found.first_tokens)


def test_limits_hold_and_a_ctrl_c_keeps_whole_rounds() -> None:
    small = measured(1, max_sequences=2, max_prompt=100)
    assert small is not None
    assert [one.streams for one in small.streams] == [1]
    assert [one.prompt_tokens for one in small.first_tokens] == [17]
    assert measured(3, stop_after=5) is None
    kept = measured(9, stop_after=400)
    assert kept is not None
    assert kept.streams[0].repetitions >= 1


def test_the_time_between_tokens_is_that_while_all_decode() -> None:
    early = Heard(first_s=1.0, last_s=5.0, tokens=5, text_s=[1.0, 3.0, 3.5, 4.0, 5.0])
    late = Heard(first_s=3.0, last_s=4.5, tokens=3, text_s=[3.0, 3.6, 4.5])
    # Together from 3.0 to 4.5: 3.0, 3.5, 4.0 of the one, all of the other.
    assert token_s([early, late]) == pytest.approx((0.5 + 0.75) / 2)
    assert token_s([early]) == pytest.approx(1.0)
    apart = Heard(first_s=9.0, last_s=10.0, tokens=3, text_s=[9.0, 9.5, 10.0])
    assert token_s([early, apart]) == pytest.approx((1.0 + 0.5) / 2)
