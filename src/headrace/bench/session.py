"""Brings it together: an endpoint is found, warmed up and measured, on one event loop.

Warm-up sends the workload itself with the same concurrency or rate, and ends before the clock
starts: no burst of its own is left in the queue of what is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

from headrace.bench.feed import Feed, clients_of
from headrace.bench.health import slow_clock
from headrace.bench.prompts import Message, Writer
from headrace.bench.run import Progress, Run, Stop
from headrace.bench.sender import EndpointSender
from headrace.bench.spend import Purse
from headrace.bench.summary import Summary, is_narrow, summarize
from headrace.bench.target import Target, find_target
from headrace.client.answer import Failure
from headrace.client.connection import Address, Connections, unreachable
from headrace.workload.slo import Slo
from headrace.workload.workload import Workload

T = TypeVar("T")
_MOST_READY = 256  # connections that are opened before the clock starts
INTERRUPTED = "it was interrupted"
_WARM_UP_SEED = 7919  # other requests than those that are measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """How to measure: everything but the workload itself."""

    address: Address
    model: str | None = None
    path: str = "/v1/chat/completions"
    key: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    stop: Stop = field(default_factory=Stop)
    precision: float | None = None  # stop when medians are known within this share of themselves
    warm_up: int = 0  # requests
    most_at_once: int | None = None
    timeout_s: float = 600.0
    seed: int = 0
    salt: str = "headrace"
    slo: Slo | None = None
    prompts: Sequence[list[Message]] = ()
    purse: Purse | None = None  # a limit for money


class Session:
    """One endpoint, for one or several runs."""

    def __init__(
        self,
        asked: Asked,
        on_tick: Callable[[Progress], None] = lambda progress: None,
        count: Callable[[str], int] | None = None,
    ) -> None:
        """`count` gives a text's tokens by a tokenizer, to check the endpoint's counts."""
        self.asked = asked
        self.target: Target | None = None
        self._on_tick = on_tick
        self._count = count
        self._connections = Connections(asked.address)
        self._run: Run | None = None
        self._runs = 0
        self._interrupts = 0
        self._prompts_sent = 0  # of a file: a run goes on where warm-up ended

    async def open(self) -> Target:
        asked = self.asked
        if asked.purse is not None:
            asked.purse.check_questions()
        await self._connections.resolve()
        self.target = await find_target(
            self._connections,
            model=asked.model,
            path=asked.path,
            key=asked.key,
            extra=asked.extra,
            salt=asked.salt,
            writes_prompts=not asked.prompts,
            on_answer=(lambda answer: None) if asked.purse is None else asked.purse.pay,
        )
        return self.target

    def close(self) -> None:
        self._connections.close()

    @property
    def is_interrupted(self) -> bool:
        return self._interrupts > 0

    def interrupt(self) -> None:
        """What was measured so far is kept: nothing more is sent; the second time what is on its
        way is given up. The third time, or where nothing was measured, everything ends at once."""
        self._interrupts += 1
        if self._run is None or self._interrupts > 2:
            raise KeyboardInterrupt
        self._run.stop(INTERRUPTED)
        if self._interrupts == 2:
            self._run.cut()

    async def measure(
        self,
        workload: Workload,
        stop: Stop | None = None,
        *,
        warm_up: int | None = None,
        enough: Callable[[Progress], bool] | None = None,
    ) -> Summary:
        """`enough` ends the run early, in place of the asked precision."""
        asked = self.asked
        stop = stop or asked.stop
        clients = clients_of(workload)
        await self._ready(clients or _MOST_READY // 8)
        count = asked.warm_up if warm_up is None else warm_up
        if count:
            await self._once(workload, Stop(requests=count), _WARM_UP_SEED, "warm-up")
        run = await self._once(workload, stop, asked.seed, "run", enough)
        progress = run.progress
        if self._count is not None:  # after the run: it takes time that is not the endpoint's
            for record in progress.records:
                said = "".join((*record.answer.hidden, *record.answer.text))
                record.retokenized = self._count(said) if said else None
        whole = [one for one in progress.records if one.answer.failure is not Failure.STOPPED]
        return summarize(
            sorted(whole, key=lambda one: one.scheduled_s),
            lags_s=run.pulse.lags_s,
            cpu_share=run.pulse.cpu_share,
            slo=asked.slo,
            most_at_once=progress.most_at_once,
            samples=progress.samples,
            notes=tuple(self._notes(progress, len(progress.records) - len(whole))),
            began_unix_s=run.began_unix_s,
            ended_by=progress.ended_by,
            has_given_up=progress.has_given_up,
        )

    async def check(self) -> None:
        """Raises Unreachable if nobody listens any more."""
        try:
            await self._connections.check()
        except OSError as error:
            raise unreachable(self.asked.address, error) from None

    def _notes(self, progress: Progress, cut: int) -> Iterator[str]:
        if progress.ended_by:
            yield f"ended early: {progress.ended_by}"
        if cut:
            yield f"{cut} requests on their way were cut off and are left out"
        prompts = len(self.asked.prompts)
        if prompts and self._prompts_sent > prompts:
            yield (
                f"{self._prompts_sent} requests with {prompts} prompts, warm-up included: some "
                "came twice, and a prefix cache knows them"
            )
        if (slow := slow_clock()) is not None:
            yield slow

    async def _ready(self, count: int) -> None:
        try:
            await self._connections.prepare(min(count, _MOST_READY))
        except OSError as error:
            raise unreachable(self.asked.address, error) from None

    async def _once(
        self,
        workload: Workload,
        stop: Stop,
        seed: int,
        name: str,
        enough: Callable[[Progress], bool] | None = None,
    ) -> Run:
        assert self.target is not None, "open first"
        asked, clients = self.asked, clients_of(workload)
        self._runs += 1
        writer = Writer(self.target.scale, f"{asked.salt} {name} {self._runs}")
        sender = EndpointSender(
            self._connections,
            self.target,
            writer,
            timeout_s=asked.timeout_s,
            prompts=asked.prompts,
            first=self._prompts_sent,
        )
        precision, purse = asked.precision, asked.purse
        self._run = run = Run(
            sender,
            most_at_once=asked.most_at_once,
            on_tick=self._on_tick,
            may_send=(lambda ask: True) if purse is None else purse.may_send,
            on_record=(lambda record: None) if purse is None else purse.settle,
            enough=enough
            or (lambda progress: precision is not None and is_narrow(progress.records, precision)),
        )
        if self.is_interrupted:
            run.stop(INTERRUPTED)
        asks = workload.asks(seed)
        if clients is None and stop.requests is not None:
            asks = islice(asks, stop.requests)  # whole sessions
        await run.run(Feed(asks, clients), stop)
        self._prompts_sent += run.progress.sent if asked.prompts else 0
        return run


def run_session(session: Session, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """On a fast event loop where there is one. Ctrl-C, or a polite kill, ends a run and keeps what
    it has."""

    async def whole() -> T:
        try:
            return await work()
        finally:
            session.close()

    with asyncio.Runner(loop_factory=loop_factory()) as runner, _ended_by(session, runner):
        return runner.run(whole())


@contextlib.contextmanager
def _ended_by(session: Session, runner: asyncio.Runner) -> Iterator[None]:
    """Signals interrupt the session, and mean afterwards what they meant before: a loop leaves
    handlers behind that ignore them, also in processes that are forked later."""
    loop, before = runner.get_loop(), {}
    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.getsignal(number)
            loop.add_signal_handler(number, session.interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            with contextlib.suppress(RuntimeError, ValueError):
                loop.remove_signal_handler(number)
                signal.signal(number, handler)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
