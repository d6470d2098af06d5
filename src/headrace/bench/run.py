"""One run: requests go out at their times, whatever the endpoint does, and records come back.

A single dispatcher sends everything in order of time. A request that has to wait, for a place below
`most_at_once` or for a connection, still counts from the time at which it was to be sent. Knows no
statistics; how a request is really sent is its `Sender`'s.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count as counting
from typing import Protocol

from headrace.bench.feed import Feed
from headrace.bench.health import Pulse
from headrace.bench.record import Record
from headrace.client.answer import Failure
from headrace.workload.ask import Ask

_SPIN_S = 0.0012  # timers are late by a millisecond: the last part is waited for in small steps
_AHEAD_S = 1.0
_TICK_S = 0.1
_TICKS_SHOWN = 5  # every half second
_DUE_S, _SHORT_S = 1e-9, 1e-6
_IDLE_S = 0.002  # so long before the next request there is time to prepare another
_BUSY_S = 0.02  # so long a busy client puts off to prepare one more
_MOST_FAILED = 20  # in a row: an endpoint that died is not asked for the rest of the run
SPENT = "the spend limit is reached"


class Sender(Protocol):
    @property
    def is_idle(self) -> bool:
        """Nothing that arrived waits to be read: there is time for other things."""
        ...

    def prepare(self, ask: Ask, number: int) -> bytes:
        """A whole request. An ask that follows others is prepared after their answers."""
        ...

    async def send(self, record: Record, request: bytes, began_s: float) -> None:
        """Fills the record's answer, with times from `began_s` on. Never raises."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Whichever comes first. A request is never stopped in its middle."""

    requests: int | None = None
    duration_s: float | None = None  # nothing is sent that is scheduled later


@dataclass(slots=True)
class Progress:
    """Where a run is; shown while it lasts."""

    sent: int = 0
    done: int = 0
    failed: int = 0
    at_once: int = 0
    most_at_once: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    failed_in_a_row: int = 0
    ended_by: str = ""  # why the run ended before its time; empty: it did not
    has_given_up: bool = False  # it ended because the endpoint only failed
    records: list[Record] = field(default_factory=list)
    samples: list[tuple[float, int]] = field(default_factory=list)  # (when, requests at once)


@dataclass(order=True, slots=True)
class _Due:
    at_s: float
    number: int
    ask: Ask = field(compare=False)
    request: bytes = field(compare=False)


class Run:
    """`enough` is asked every half second: True ends the run early. `may_send` is asked before each
    request: False ends it, because the money is spent."""

    def __init__(
        self,
        sender: Sender,
        *,
        clock: Callable[[], float] = time.perf_counter,
        spin_s: float = _SPIN_S,
        most_at_once: int | None = None,
        on_tick: Callable[[Progress], None] = lambda progress: None,
        enough: Callable[[Progress], bool] = lambda progress: False,
        may_send: Callable[[Ask], bool] = lambda ask: True,
        on_record: Callable[[Record], None] = lambda record: None,
    ) -> None:
        self._sender = sender
        self._clock = clock
        self._spin_s = spin_s
        self._places = asyncio.Semaphore(most_at_once) if most_at_once else None
        self._on_tick = on_tick
        self._enough = enough
        self._may_send = may_send
        self._on_record = on_record
        self._heap: list[_Due] = []
        self._numbers = counting()
        self._tasks: set[asyncio.Task[None]] = set()
        self._waker: asyncio.Future[None] | None = None
        self._began_s = 0.0
        self._is_over = False
        self._taken = 0
        self._read_s = 0.0  # up to this time requests are prepared
        self._is_all_read = False
        self._idle_s = 0.0  # when there was last time to prepare a request
        self._sent: deque[Ask] = deque()  # of clients whose next request is not prepared yet
        self._ready: dict[Ask, tuple[int, bytes]] = {}  # prepared before their time
        self.progress = Progress()
        self.pulse = Pulse(clock)
        self.began_unix_s = 0.0

    async def run(self, feed: Feed, stop: Stop) -> list[Record]:
        """In order of the scheduled times."""
        with _without_collector():
            self._began_s = self._clock()
            while self._may_read():
                self._read(feed, stop)
            self._began_s = self._clock()  # what is sent first was prepared before the start
            self.began_unix_s = time.time()
            self.pulse.start()
            ticker = asyncio.create_task(self._tick())
            try:
                while await self._step(feed, stop):
                    pass
            finally:
                ticker.cancel()
                for task in self._tasks:
                    task.cancel()
                self.pulse.stop()
                self.progress.elapsed_s = self._now()
        return sorted(self.progress.records, key=lambda one: one.scheduled_s)

    def stop(self, why: str = "") -> None:
        """Nothing more is sent; what is on its way is waited for."""
        self._is_over = True
        self.progress.ended_by = self.progress.ended_by or why
        self._heap.clear()
        self._wake()

    def cut(self) -> None:
        """What is on its way is given up, and has no figures; everything before it is kept."""
        self.stop()
        for task in tuple(self._tasks):
            task.cancel()

    async def _step(self, feed: Feed, stop: Stop) -> bool:
        """Sends one request, or waits. False: the run is over."""
        left_s = self._left_s()
        if left_s > _IDLE_S and (self._sent or self._may_read()):
            sent = self.progress.sent
            await asyncio.sleep(0)  # what was dispatched goes out first
            is_idle = self.progress.sent == sent and self._sender.is_idle
            if is_idle or self._now() - self._idle_s > _BUSY_S:
                self._idle_s = self._now()
                if self._left_s() > _IDLE_S:
                    self._prepare_one(feed, stop)
            return True
        if not self._heap:
            if not self._tasks:
                return False
            await self._pause(None)
            return True
        if left_s > _DUE_S:
            if left_s > self._spin_s:
                await self._pause(min(left_s - self._spin_s, self._until_read_s()))
            else:
                await asyncio.sleep(0)
            return True
        due = heapq.heappop(self._heap)
        if self._may_go(due.ask):
            task = asyncio.create_task(self._client(due, feed, stop))
            self._tasks.add(task)
            task.add_done_callback(self._has_ended)
        return True

    def _may_go(self, ask: Ask) -> bool:
        """Counts it as sent; False: the run is over."""
        if not self._may_send(ask):
            self.stop(SPENT)
            return False
        self.progress.sent += 1
        self._sent.append(ask)
        return True

    async def _client(self, due: _Due | None, feed: Feed, stop: Stop) -> None:
        """One request, and what follows it at once, without a way through the dispatcher."""
        while due is not None:
            record = await self._one(due)
            self._give_up_on(record)
            found = feed.follower(due.ask, record.end_s)
            due = self._at_once() if self._push(found, stop) else None

    def _at_once(self) -> _Due | None:
        """What is due first, if it is due now."""
        if self._left_s() > _DUE_S:
            self._wake()
            return None
        due = heapq.heappop(self._heap)
        return due if self._may_go(due.ask) else None

    async def _one(self, due: _Due) -> Record:
        record = Record(ask=due.ask, scheduled_s=due.at_s, began_s=self._now())
        progress = self.progress
        try:
            if self._places is not None:
                await self._places.acquire()
            progress.at_once += 1
            progress.most_at_once = max(progress.most_at_once, progress.at_once)
            try:
                await self._sender.send(record, due.request, self._began_s)
            finally:
                progress.at_once -= 1
                if self._places is not None:
                    self._places.release()
        except asyncio.CancelledError:
            record.answer.fail(Failure.STOPPED, "the run was stopped")
            raise
        finally:
            record.end_s = record.end_s or self._now()
            progress.records.append(record)
            self._on_record(record)
            progress.done += record.is_good
            progress.failed += not record.is_good
            progress.failed_in_a_row = 0 if record.is_good else progress.failed_in_a_row + 1
            progress.tokens += record.tokens if record.is_good else 0
            self._wake()
        return record

    def _give_up_on(self, record: Record) -> None:
        """Where this failure was one too many."""
        progress = self.progress
        if progress.failed_in_a_row >= max(_MOST_FAILED, 2 * progress.most_at_once):
            failure = f"{record.answer.failure}: {record.answer.detail}"
            progress.has_given_up = True
            self.stop(f"{progress.failed_in_a_row} requests in a row failed, the last by {failure}")

    def _has_ended(self, task: asyncio.Task[None]) -> None:
        """Also one that was cut off before its first step."""
        self._tasks.discard(task)
        self._wake()

    def _left_s(self) -> float:
        return self._heap[0].at_s - self._now() if self._heap else math.inf

    def _prepare_one(self, feed: Feed, stop: Stop) -> None:
        """While nothing is due: a request that has a time, or what a client of a closed loop sends
        next, so that it goes out at once when its time comes."""
        if self._may_read():
            self._read(feed, stop)
            return
        ask = feed.next_of(self._sent.popleft())
        if ask is not None and not self._is_over:
            number = next(self._numbers)
            self._ready[ask] = (number, self._sender.prepare(ask, number))

    def _may_read(self) -> bool:
        """Requests of the next second, and at least one, are prepared before their time, so that
        those of a burst go out together."""
        is_open = not self._is_over and not self._is_all_read
        return is_open and self._read_s <= self._now() + _AHEAD_S

    def _until_read_s(self) -> float:
        if self._is_over or self._is_all_read:
            return math.inf
        return max(_SHORT_S, self._read_s - _AHEAD_S - self._now())

    def _read(self, feed: Feed, stop: Stop) -> None:
        found = feed.timed()
        if found is None or not self._push(found, stop):
            self._is_all_read = True
        else:
            self._read_s = max(self._read_s, found[0])

    def _push(self, found: tuple[float, Ask] | None, stop: Stop) -> bool:
        if found is None or self._is_over:
            return False
        at_s, ask = found
        if stop.requests is not None and self._taken >= stop.requests:
            return False
        if stop.duration_s is not None and at_s > stop.duration_s:
            return False
        self._taken += 1
        if (found_ready := self._ready.pop(ask, None)) is not None:
            number, request = found_ready
        else:
            number = next(self._numbers)
            request = self._sender.prepare(ask, number)
        heapq.heappush(self._heap, _Due(at_s, number, ask, request))
        return True

    async def _tick(self) -> None:
        for number in counting(1):
            await asyncio.sleep(_TICK_S)
            self.progress.elapsed_s = self._now()
            self.progress.samples.append((self._now(), self.progress.at_once))
            if number % _TICKS_SHOWN:
                continue
            self._on_tick(self.progress)
            if not self._is_over and self._enough(self.progress):
                self.stop()

    async def _pause(self, seconds: float | None) -> None:
        """Until the time has passed, or something changed."""
        loop = asyncio.get_running_loop()
        self._waker = loop.create_future()
        timer = None if seconds is None else loop.call_later(seconds, self._wake)
        try:
            await self._waker
        finally:
            self._waker = None
            self._idle_s = self._now()
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)

    def _now(self) -> float:
        return self._clock() - self._began_s


@contextmanager
def _without_collector() -> Iterator[None]:
    """Its pauses would be taken for the endpoint's."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
