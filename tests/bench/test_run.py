"""Schedules on a virtual clock: every time is exact."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import pytest
from tests.bench.virtual import Scripted, VirtualLoop, run_virtually

from headrace.bench.feed import Feed
from headrace.bench.record import Record
from headrace.bench.run import Run, Stop
from headrace.client.answer import Failure
from headrace.workload.arrivals import ClosedLoop, OpenLoop
from headrace.workload.ask import Ask
from headrace.workload.distribution import Constant
from headrace.workload.workload import Lengths, Synthetic, fixed

Clock = Callable[[], float]


def once(at_s: float) -> Ask:
    return Ask(at_s=at_s, prompt_tokens=10, output_tokens=3)


def served(
    asks: Iterable[Ask],
    *,
    clients: int | None = None,
    stop: Stop | None = None,
    most_at_once: int | None = None,
    places: int | None = None,
    first_s: float = 0.1,
) -> tuple[list[Record], Scripted]:
    made: list[Scripted] = []

    async def work(clock: Clock) -> list[Record]:
        made.append(Scripted(clock, places=places, first_s=first_s))
        run = Run(made[0], clock=clock, spin_s=0.0, most_at_once=most_at_once)
        return await run.run(Feed(iter(asks), clients), stop or Stop())

    return run_virtually(work), made[0]


def test_an_open_loop_sends_at_its_times_whatever_the_server_does() -> None:
    records, _ = served([once(0.0), once(0.5), once(0.51), once(2.0)], places=1, first_s=1.0)
    assert [one.sent_s for one in records] == pytest.approx([0.0, 0.5, 0.51, 2.0])
    # The server has one place: the second waits for the first's 1.02 s, and so on.
    assert [one.ttft_s for one in records] == pytest.approx([1.0, 1.52, 2.53, 2.06])


def test_a_burst_is_sent_at_once() -> None:
    records, server = served([once(1.0)] * 64)
    assert [one.sent_s for one in records] == pytest.approx([1.0] * 64, abs=1e-9)
    assert server.most_at_once == 64


def test_a_closed_loop_keeps_its_concurrency_until_it_stops() -> None:
    workload = Synthetic(prompts=fixed(10), outputs=fixed(3), arrivals=ClosedLoop(clients=4))
    records, server = served(workload.asks(), clients=4, stop=Stop(requests=10))
    assert len(records) == 10
    assert server.most_at_once == 4
    # An answer takes 0.12 s; each client sends again as soon as it has one.
    expected = [0.0] * 4 + [0.12] * 4 + [0.24] * 2
    assert [one.scheduled_s for one in records] == pytest.approx(expected)


def test_in_a_closed_loop_a_fast_client_sends_more() -> None:
    """A fixed share for each client would leave the last one alone at the end."""
    workload = Synthetic(prompts=fixed(10), outputs=fixed(3), arrivals=ClosedLoop(clients=2))

    class Uneven(Scripted):
        async def _answer(self, record: Record, began_s: float) -> None:
            self._first_s = 1.0 if record.ask.session == 0 else 0.08
            await super()._answer(record, began_s)

    async def work(clock: Clock) -> list[Record]:
        run = Run(Uneven(clock), clock=clock, spin_s=0.0)
        return await run.run(Feed(workload.asks(), 2), Stop(requests=11))

    sessions = [one.ask.session for one in run_virtually(work)]
    assert (sessions.count(0), sessions.count(1)) == (1, 10)


def test_a_later_turn_follows_its_answer_after_the_wait() -> None:
    workload = Synthetic(
        prompts=fixed(10), outputs=fixed(3), arrivals=OpenLoop(rate_s=0.1, cv=0.0),
        turns=fixed(3), waits=Constant(2.0),
    )  # fmt: skip
    records, _ = served(workload.asks(count=6))
    expected = [0.0, 2.12, 4.24, 10.0, 12.12, 14.24]
    assert [one.scheduled_s for one in records] == pytest.approx(expected)
    assert [one.ask.turn for one in records] == [0, 1, 2, 0, 1, 2]


def test_a_turn_of_a_trace_that_is_read_after_its_predecessor_ended() -> None:
    def turn(number: int, at_s: float, after_s: float | None) -> Ask:
        return Ask(at_s=at_s, prompt_tokens=5, output_tokens=3, session=0, turn=number,
                   after_s=after_s)  # fmt: skip

    asks = [turn(0, 0.0, None), once(5.0), turn(1, 5.0, 0.5), once(6.0)]
    records, _ = served(asks)
    assert [one.scheduled_s for one in records] == pytest.approx([0.0, 5.0, 5.0, 6.0])


def test_nothing_is_sent_after_the_duration_and_nothing_is_cut_off() -> None:
    records, _ = served([once(0.3 * n) for n in range(9)], stop=Stop(duration_s=1.0))
    assert [one.scheduled_s for one in records] == pytest.approx([0.0, 0.3, 0.6, 0.9])
    assert all(one.is_good for one in records)


def test_an_endpoint_that_died_is_not_asked_for_ever() -> None:
    class Dead(Scripted):
        async def send(self, record: Record, request: bytes, began_s: float) -> None:
            record.answer.fail(Failure.CONNECT, "refused")

    async def work(clock: Clock) -> Run:
        run = Run(Dead(clock), clock=clock, spin_s=0.0)
        workload = Synthetic(prompts=fixed(10), outputs=fixed(3), arrivals=ClosedLoop(clients=2))
        await run.run(Feed(workload.asks(), 2), Stop(requests=1000))
        return run

    run = run_virtually(work)
    assert 20 <= len(run.progress.records) <= 22
    assert "connection refused" in run.progress.ended_by


def test_a_limit_of_money_ends_the_run_and_keeps_what_came() -> None:
    left = [3]

    def may_send(ask: Ask) -> bool:
        left[0] -= 1
        return left[0] >= 0

    async def work(clock: Clock) -> Run:
        run = Run(Scripted(clock), clock=clock, spin_s=0.0, may_send=may_send)
        await run.run(Feed(iter([once(0.0), once(1.0), once(2.0), once(3.0)])), Stop())
        return run

    run = run_virtually(work)
    assert len(run.progress.records) == 3
    assert run.progress.ended_by == "the spend limit is reached"


def test_sessions_of_a_workload_by_lengths_stay_within_the_count() -> None:
    workload = Synthetic(
        prompts=Lengths(Constant(8)), outputs=fixed(3), arrivals=OpenLoop(rate_s=50, cv=1.0)
    )
    records, _ = served(workload.asks(count=30), stop=Stop(requests=30))
    assert len(records) == 30
    times = [one.scheduled_s for one in records]
    assert times == sorted(times)
    assert times == [ask.at_s for ask in workload.asks(count=30)]


def test_in_a_closed_loop_the_next_request_is_prepared_before_its_time() -> None:
    """A prompt of many words takes time, in which the endpoint would idle and the client be late.
    A turn that continues a conversation has to wait for what was said."""

    async def work(clock: Clock, turns: int) -> list[bool]:
        before: list[bool] = []

        class Watched(Scripted):
            def prepare(self, ask: Ask, number: int) -> bytes:
                before.append(self.at_once > 0)
                return super().prepare(ask, number)

        arrivals = ClosedLoop(clients=1)
        workload = Synthetic(
            prompts=fixed(10), outputs=fixed(3), arrivals=arrivals, turns=fixed(turns)
        )
        run = Run(Watched(clock), clock=clock, spin_s=0.0)
        records = await run.run(Feed(workload.asks(), 1), Stop(requests=4))
        assert len(records) == 4
        return before[:4]

    assert run_virtually(lambda clock: work(clock, 1)) == [False, True, True, True]
    assert run_virtually(lambda clock: work(clock, 2)) == [False, False, True, False]


def test_a_client_that_is_busy_reading_prepares_nothing_for_a_while() -> None:
    """Tokens of a burst are stamped meanwhile. But it is put off only so long: a client that is
    always busy still sends."""

    async def work(clock: Clock) -> list[float]:
        at_s: list[float] = []

        class Busy(Scripted):
            is_idle = False

            def prepare(self, ask: Ask, number: int) -> bytes:
                at_s.append(clock())
                return super().prepare(ask, number)

        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)

        async def read() -> None:
            while True:
                loop.compute(0.001)
                await asyncio.sleep(0)

        workload = Synthetic(prompts=fixed(10), outputs=fixed(3), arrivals=ClosedLoop(clients=1))
        reading = asyncio.create_task(read())
        run = Run(Busy(clock), clock=clock, spin_s=0.0)
        await run.run(Feed(workload.asks(), 1), Stop(requests=2))
        reading.cancel()
        return at_s

    first_s, second_s, *_ = run_virtually(work)
    assert first_s == 0.0
    assert 0.02 < second_s < 0.05  # and the first answer takes 0.12 s


def test_a_closed_loop_counts_from_the_last_bytes_of_the_answer_before() -> None:
    """What the client takes to read an answer is its own delay, not nobody's."""

    class Reading(Scripted):
        async def send(self, record: Record, request: bytes, began_s: float) -> None:
            await super().send(record, request, began_s)
            record.end_s = self._clock() - began_s
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            loop.compute(0.05)

    async def work(clock: Clock) -> list[Record]:
        workload = Synthetic(prompts=fixed(10), outputs=fixed(3), arrivals=ClosedLoop(clients=1))
        run = Run(Reading(clock), clock=clock, spin_s=0.0)
        return await run.run(Feed(workload.asks(), 1), Stop(requests=3))

    records = run_virtually(work)
    assert [one.scheduled_s for one in records] == pytest.approx([0.0, 0.12, 0.29])
    assert [one.late_s for one in records] == pytest.approx([0.0, 0.05, 0.05])
