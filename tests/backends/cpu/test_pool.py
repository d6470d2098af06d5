"""Threads that lose their cores: who is waited for, and that nothing but time depends on them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest
from tests.backends.random_models import SPECS, RandomTensor, make_weights, run
from tests.plans import Draw, Found, Row

from headrace.backends.cpu import _native, machine
from headrace.backends.cpu.runner import CpuRunner

SLICE_S = 0.006  # what a thread that lost its core is away for, roughly


def late_until_out(thread: _native.Attendance, now: float, *, every: float, waited: float) -> float:
    """Late again and again, until it is left out; when that was."""
    for _ in range(1000):
        now += every
        if thread.late(now, waited, 2):
            return now
    raise AssertionError("never left out")


def test_small_waits_are_nothing() -> None:
    thread = _native.Attendance()
    for i in range(10_000):  # a fifth of the time, in small pieces
        assert not thread.late(i * 0.001, 0.0002, 2)
    assert not thread.late(20.0, SLICE_S, 2)  # once
    assert not thread.late(20.5, SLICE_S, 2)  # and long after it once more
    assert not thread.out


def test_whoever_is_away_most_of_the_time_is_left_out_and_tried_again() -> None:
    thread = _native.Attendance()
    out_at = late_until_out(thread, 100.0, every=0.007, waited=SLICE_S)
    assert thread.out
    assert out_at < 100.05
    assert not thread.returns(out_at + 0.05, 2)
    assert thread.returns(out_at + 0.11, 2)
    assert not thread.out
    assert not thread.returns(out_at + 0.12, 2)  # it is there


def test_rests_grow_while_it_fails_and_start_anew_once_it_lasted() -> None:
    thread = _native.Attendance()
    now = late_until_out(thread, 100.0, every=0.007, waited=SLICE_S)
    rests = []
    for _ in range(8):
        rest = 0.0
        while not thread.returns(now + rest, 2):
            rest += 0.01
        rests.append(rest)
        now = late_until_out(thread, now + rest, every=0.007, waited=SLICE_S)
    assert rests[0] == pytest.approx(0.1, abs=0.02)
    assert all(after >= before for before, after in itertools.pairwise(rests))
    assert rests[-1] == pytest.approx(3.2, abs=0.02)
    assert thread.returns(now + 4, 2)
    now = late_until_out(thread, now + 10, every=0.007, waited=SLICE_S)  # it had lasted 6 s
    assert thread.returns(now + 0.11, 2)


def test_one_of_many_may_cost_less() -> None:
    few, many = _native.Attendance(), _native.Attendance()
    assert not few.late(1.0, 0.004, 2)
    assert many.late(1.0, 0.004, 16)


@pytest.fixture
def one_processor() -> Iterator[None]:
    """All threads that are made in here share one processor: they take turns, and lose it often."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


def texts(runner: CpuRunner) -> list[list[Found]]:
    """A prompt in two chunks beside others that decode, then forty tokens of three sequences."""
    draw = Draw(temperature=0.9, top_p=0.9, uniform=0.3)
    tables = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10], [11, 12, 13, 14]]

    def entry(number: int, tokens: list[int], start: int) -> Row:
        return Row(
            sequence_id=number,
            token_ids=tokens,
            start=start,
            block_table=tables[number],
            draw=draw,
            top_logprobs=3,
        )

    found = [
        run(runner, entry(0, list(range(40)), 0), entry(1, [3], 0), entry(2, [9, 4], 0)),
        run(runner, entry(0, list(range(40, 50)), 40), entry(1, [5], 1), entry(2, [4], 2)),
    ]
    for step in range(40):
        found.append(run(runner, *(entry(n, [step], (50, 2, 3)[n] + step) for n in range(3))))
    return found


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F32"])
@pytest.mark.usefixtures("one_processor")
def test_the_same_bits_with_more_threads_than_processors(
    kind: str, random_tensor: RandomTensor
) -> None:
    spec = SPECS["gemma-like"]
    weights = make_weights(spec, random_tensor, kind)
    expected = texts(CpuRunner(spec, weights, total_blocks=16, threads=1))
    for threads in (2, 5):
        crowded = CpuRunner(spec, weights, total_blocks=16, threads=threads)
        assert texts(crowded) == expected


def test_members_are_counted() -> None:
    pool = _native.Pool(3)
    assert pool.take_mean_members() == 3  # nothing was shared out yet
    _native.measure_peaks(pool, 1 << 20)
    assert 1 <= pool.take_mean_members() <= 3


def test_no_more_threads_than_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_allowed_cpus", lambda: [0, 1, 5])
    assert machine.choose_threads(3) == (3, "as asked")
    count, why = machine.choose_threads(8)
    assert count == 3
    assert "8 were requested" in why
