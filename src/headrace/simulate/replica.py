"""One server on a virtual clock: its queue, its engine over a cost model, and the time around them.

The engine, its scheduler and its prefix cache are those that serve; so are the bounds of the queue.
A replica does something at moments only: when a step has ended, and when a request arrives while it
is idle. `next_s` says when the next moment is, `wake` lets it come; whoever owns several replicas
lets the earliest go first. Knows no other replica and no routing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from headrace.core.clock import VirtualClock
from headrace.core.config import SchedulerConfig
from headrace.core.errors import HeadraceError
from headrace.core.request import FinishReason, GenerateRequest, SampledToken
from headrace.core.step import RunnerLimits
from headrace.engine.loop import Engine
from headrace.engine.stats import EngineStats
from headrace.policies.queue import QueueBounds, Ticket
from headrace.simulate.cost import Cost
from headrace.simulate.guesses import simulated_speculator
from headrace.simulate.handover import Room, receive
from headrace.simulate.intake import Intake
from headrace.simulate.lean import LeanRunner
from headrace.simulate.prompts import Prompts
from headrace.simulate.served import Served
from headrace.workload.ask import Ask


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """The time between the client and the engine, which no step overlaps with. Of what comes before
    the engine, some is a delay, which many requests may have at once; the rest keeps the server's
    one process busy, which works on all requests that have come (see Intake)."""

    before_s: float = 0.0  # delay of a request
    before_token_s: float = 0.0  # and for each token of its prompt
    busy_s: float = (
        0.0  # work for a request: parsing, templates, sending it to the engine's process
    )
    busy_token_s: float = 0.0  # and for each token of its prompt: tokenizing
    after_s: float = 0.0  # of a token: making text of it, and its way to the client

    def delay_s(self, ask: Ask) -> float:
        return self.before_s + self.before_token_s * ask.prompt_tokens

    def work_s(self, ask: Ask) -> float:
        return self.busy_s + self.busy_token_s * ask.prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """As `core.server_config.ServerConfig` has them; None: without bound."""

    max_waiting_requests: int | None = 256
    max_waiting_tokens: int | None = 262_144
    max_prompt_tokens: int | None = None


UNBOUNDED = QueueLimits(max_waiting_requests=None, max_waiting_tokens=None)
_NO_BOUND = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a replica is: the machine's limits and costs, and how it is configured.

    `limits.steps_in_flight` decides whether the host's time hides behind the device's: with 2 it
    does, with 1 it does not. `host` and `result` are the host's times of a step, see Timeline.
    """

    limits: RunnerLimits
    cost: Cost
    host: Cost | None = None
    result: Cost | None = None
    config: SchedulerConfig = field(default_factory=SchedulerConfig)
    edge: Edge = field(default_factory=Edge)
    queue: QueueLimits = field(default_factory=QueueLimits)
    acceptance: float | None = None  # tokens are guessed, and this share of them is right


class Replica:
    def __init__(
        self,
        setup: Setup,
        *,
        prompts: Prompts | None = None,
        start_s: float = 0.0,
        make_runner: Callable[..., LeanRunner] = LeanRunner,
    ) -> None:
        self.setup = setup
        self._clock = VirtualClock(start_s)
        guesses = None
        limits = setup.limits
        if setup.acceptance is not None:
            guesses = simulated_speculator(setup.acceptance, self._clock)
            limits = replace(limits, draws_drafts=True)
        runner = make_runner(
            limits,
            cost=setup.cost,
            clock=self._clock,
            host=setup.host,
            result=setup.result,
        )
        config = replace(setup.config, remembered_evictions=0)
        self._engine = Engine(runner, frozenset(), config, self._clock, guesses)
        self._prompts = prompts or Prompts()
        self._queue_s = start_s  # what the queue takes for now
        self._queue = QueueBounds(
            max_waiting_requests=setup.queue.max_waiting_requests or _NO_BOUND,
            max_waiting_tokens=setup.queue.max_waiting_tokens or _NO_BOUND,
            max_prompt_tokens=setup.queue.max_prompt_tokens,
            clock=lambda: self._queue_s,
        )
        # On their way, each with whether its keys and values come along.
        self._intake: Intake[tuple[Served, bool]] = Intake()
        self._handed: deque[GenerateRequest] = deque()  # wait for room for their blocks
        self._entered: list[GenerateRequest] = []  # in the queue; the engine has them next
        self._live: dict[str, Served] = {}
        self._tickets: dict[str, Ticket] = {}
        self._added_s: dict[str, float] = {}  # when the engine got those that have not started
        self._awaiting: dict[str, Served] = {}  # those without a first token
        self.begun: list[Served] = []  # those that the last wake gave their first token
        self._drawn: list[SampledToken] = []  # by the step that is being computed
        self._is_computing = False
        self._next_id = 0

    # -- moments -------------------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        return self._clock.now_s()

    @property
    def next_s(self) -> float:
        """When it has something to do; infinity: not before a request is offered."""
        if self._is_computing or self._entered or self._handed or self._engine.has_work:
            return self._clock.now_s()
        return self._intake.next_s

    def offer(self, served: Served, arrival_s: float) -> None:
        """A request comes. Not before those that were offered earlier, nor before the last wake."""
        edge, ask = self.setup.edge, served.ask
        self._intake.offer(
            (served, False), arrival_s, work_s=edge.work_s(ask), delay_s=edge.delay_s(ask)
        )

    def hand_over(self, served: Served, at_s: float) -> None:
        """A sequence comes whose prompt another replica has computed. It starts when there is room
        for its blocks, without a place in the server's queue."""
        self._intake.offer((served, True), at_s)

    def wake(self) -> list[Served]:
        """Let its next moment come. Returns the requests that ended then."""
        now_s = self.next_s
        if now_s > self._clock.now_s():
            self._clock.advance(now_s - self._clock.now_s())
        self.begun = []
        ended = self._receive(now_s)
        if self._is_computing:
            ended += self._take_result(now_s)
        ended += self._submit(now_s)
        if self._engine.has_work:
            self._drawn = self._engine.step()
            self._is_computing = True
        return ended

    # -- what happens in one -------------------------------------------------------------------

    def _receive(self, now_s: float) -> list[Served]:
        """Requests that have arrived by now enter the queue, each at its own time."""
        refused = []
        for ready_s, (served, is_handed) in self._intake.take(now_s):
            self._queue_s = ready_s
            request = self._prompts.request(served.ask, str(self._next_id))
            self._next_id += 1
            if is_handed:
                self._live[request.request_id] = served
                self._handed.append(request)
                continue
            try:
                ticket = self._queue.enter(request)
            except HeadraceError as error:
                refused.append(self._refuse(served, error, self._queue_s))
                continue
            self._live[request.request_id] = served
            self._tickets[request.request_id] = ticket
            self._entered.append(request)
        return refused

    def _submit(self, now_s: float) -> list[Served]:
        """Give the engine what has entered the queue."""
        refused = []
        if self._handed:
            room = Room(self._engine)
            while self._handed and room.take(self._handed[0]):
                receive(self._engine, self._handed[0])
                self._entered.append(self._handed.popleft())
        for request in self._entered:
            request_id = request.request_id
            try:
                self._engine.add(request)
            except HeadraceError as error:
                self._leave(request_id)
                refused.append(self._refuse(self._live.pop(request_id), error, now_s))
                continue
            self._awaiting[request_id] = self._live[request_id]
            self._added_s[request_id] = now_s
            request.prompt_token_ids = []  # the engine has a copy, and nobody else needs it
        self._entered.clear()
        return refused

    def _take_result(self, now_s: float) -> list[Served]:
        """Tokens of the step that ended now, and requests that started in it."""
        self._is_computing = False
        self._queue_s = now_s
        for started in self._engine.take_started():
            self._leave(started.request_id)
            served = self._live[started.request_id]
            served.started_s = self._added_s.pop(started.request_id) + started.waited_s
            served.cached_tokens = started.cached_tokens
        seen_s = now_s + self.setup.edge.after_s
        if self._awaiting:
            for token in self._drawn:
                first = self._awaiting.pop(token.request_id, None)
                if first is not None:
                    first.first_s = seen_s
                    self.begun.append(first)
        return [
            self._finish(token, seen_s) for token in self._drawn if token.finish_reason is not None
        ]

    def _finish(self, token: SampledToken, seen_s: float) -> Served:
        served = self._live.pop(token.request_id)
        served.end_s = seen_s
        if token.finish_reason is FinishReason.LENGTH:
            served.tokens = served.ask.output_tokens
        else:
            served.refused = token.error or str(token.finish_reason)
        self._awaiting.pop(token.request_id, None)
        return served

    def _leave(self, request_id: str) -> None:
        ticket = self._tickets.pop(request_id, None)
        if ticket is not None:
            ticket.started()

    def _refuse(self, served: Served, error: HeadraceError, now_s: float) -> Served:
        served.refused, served.end_s = type(error).__name__, now_s + self.setup.edge.after_s
        return served

    # -- what others may know of it ------------------------------------------------------------

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    @property
    def requests(self) -> int:
        """Offered and not ended."""
        return len(self._intake) + len(self._live)

    @property
    def waiting_requests(self) -> int:
        """Offered and not started."""
        return len(self._intake) + self._queue.waiting_requests

    @property
    def waiting_tokens(self) -> int:
        """Of their prompts."""
        coming = sum(served.ask.prompt_tokens for served, _ in self._intake)
        return coming + self._queue.waiting_tokens
