"""Several replicas behind a router, on one virtual time.

Each replica has a clock of its own, and the earliest moment of all comes next: a heap of moments.
The router knows what a real one knows (what it has sent, and what has come back), and its choices
are those of policies/. Prefill and decode may be apart: then a prompt is computed by one pool, its
keys and values go over a link, and another pool continues. Replicas may be added and taken away
while requests run; a new one takes its time to start. The same seed gives the same report.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random

from headrace.core.errors import ConfigError
from headrace.policies.prefixes import Caches
from headrace.policies.routing import BOUND, Counted, Ring, Routing, Wanted, key_of, route
from headrace.policies.scaling import ScalingRules, wanted_replicas
from headrace.simulate.feed import Feed
from headrace.simulate.fleet_scale import Scale
from headrace.simulate.handover import Handover, Link
from headrace.simulate.prefixes import prefixes_of
from headrace.simulate.prompts import Prompts
from headrace.simulate.replica import Replica, Setup
from headrace.simulate.report import Report
from headrace.simulate.serve import check_all_ended
from headrace.simulate.served import Served
from headrace.simulate.undisturbed import undisturbed
from headrace.workload.ask import Ask

FIRST_GUESS_TOKENS = 128.0  # of output, before any request has ended
SMOOTHING = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePool:
    """Replicas that continue what others have begun."""

    setup: Setup
    replicas: int
    handover: Handover


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSetup:
    """With `decode`, `setup` and `replicas` are those that compute prompts."""

    setup: Setup
    replicas: int = 1
    routing: Routing = Routing.LEAST_PENDING
    bound: float = BOUND  # see policies/routing.py
    prefix_tokens: int = 1 << 14  # of a prompt, that decide where it goes
    decode: DecodePool | None = None
    scaling: ScalingRules | None = None  # of `replicas`; None: as many as there are
    cold_start_s: float = 0.0  # until a replica that was added takes requests
    ttft_s: float | None = None  # the objective that scaling looks at
    seed: int = 0

    def __post_init__(self) -> None:
        pools = [self.replicas] + ([self.decode.replicas] if self.decode else [])
        if min(pools) < 1:
            raise ConfigError(f"A pool has {min(pools)} replicas; expected 1 or more.", "Add some.")


@dataclass(frozen=True, kw_only=True)
class FleetReport(Report):
    replica_s: float = 0.0  # all replicas' time from start to end: what is paid for
    # (seconds, replicas): after each change; those that start are counted, those that end are not.
    sizes: tuple[tuple[float, int], ...] = ()


def serve_fleet(asks: Iterable[Ask], fleet: FleetSetup) -> FleetReport:
    """`asks` in order of time. Runs until all have ended."""
    with undisturbed():
        return _Fleet(asks, fleet).run()


class _Pool:
    """Replicas of one kind, and what the router knows of them."""

    def __init__(self, setup: Setup, prompts: Prompts, routing: Routing, bound: float) -> None:
        self.setup = setup
        self._prompts = prompts
        self._routing, self._bound = routing, bound
        self.replicas: list[Replica] = []
        self.pending: list[int] = []  # tokens sent and not done, by replica
        self.ready: list[int] = []
        limits = setup.limits
        self._caches = Caches(limits.total_blocks * limits.block_tokens)
        self._ring = Ring(())
        self._turn = 0

    def add(self, start_s: float) -> int:
        """A replica that is not ready yet."""
        self.replicas.append(Replica(self.setup, prompts=self._prompts, start_s=start_s))
        self.pending.append(0)
        return len(self.replicas) - 1

    def open(self, number: int) -> None:
        self.ready.append(number)
        self._ring = Ring(self.ready)

    def drain(self) -> int:
        """The newest takes no more requests."""
        number = self.ready.pop()
        self._ring = Ring(self.ready)
        return number

    def send(self, wanted: Wanted, tie: float) -> tuple[int, Counted]:
        chosen = route(
            self._routing,
            wanted,
            ring=self._ring,
            pending=self.pending,
            caches=self._caches,
            turn=self._turn,
            tie=tie,
            bound=self._bound,
        )
        self._turn += 1
        counted = wanted.counted(self._caches.held_tokens(chosen, wanted.prefixes))
        self.pending[chosen] += counted.tokens
        if self._routing is Routing.PREFIX:
            self._caches.sent(chosen, wanted.prefixes, wanted.tokens)
        return chosen, counted


class _Fleet:
    def __init__(self, asks: Iterable[Ask], fleet: FleetSetup) -> None:
        self._fleet = fleet
        self._feed = Feed(asks)
        self._chooser = Random(f"fleet {fleet.seed}")
        self._usual_tokens = FIRST_GUESS_TOKENS
        prompts = Prompts()
        self._first = _Pool(fleet.setup, prompts, fleet.routing, fleet.bound)
        self._second: _Pool | None = None
        self._links: list[Link] = []
        if fleet.decode is not None:
            self._second = _Pool(fleet.decode.setup, prompts, Routing.LEAST_PENDING, BOUND)
            for _ in range(fleet.decode.replicas):
                self._second.open(self._second.add(0.0))
        # (seconds, order, pool, replica): stale ones are skipped. A pool of None: a decision.
        self._moments: list[tuple[float, int, _Pool | None, int]] = []
        self._order = 0
        self._served: list[Served] = []
        self._legs: dict[Served, Served] = {}  # what a replica serves -> what the client sees
        self._counted: dict[Served, Counted] = {}  # each leg, as its router sees it
        self._scale = Scale()
        for _ in range(fleet.replicas):
            self._start(0.0, 0.0)
        if fleet.scaling is not None:
            self._push(fleet.scaling.interval_s, None, 0)

    def run(self) -> FleetReport:
        while True:
            arrival_s = self._feed.next_s
            moment_s = self._next_moment_s()
            if arrival_s is not None and arrival_s <= moment_s:
                self._arrive(*self._feed.pop())
            elif moment_s < math.inf:
                at_s, _, pool, number = heapq.heappop(self._moments)
                if pool is None:
                    self._decide(at_s)
                else:
                    self._wake(pool, number)
            else:
                break
        check_all_ended(self._served, self._feed)
        return self._report()

    # -- moments -------------------------------------------------------------------------------

    def _push(self, at_s: float, pool: _Pool | None, number: int) -> None:
        if at_s < math.inf:
            heapq.heappush(self._moments, (at_s, self._order, pool, number))
            self._order += 1

    def _next_moment_s(self) -> float:
        """Without those that something else has overtaken."""
        while self._moments:
            at_s, _, pool, number = self._moments[0]
            if pool is None or pool.replicas[number].next_s == at_s:
                return at_s
            heapq.heappop(self._moments)
        return math.inf

    def _wake(self, pool: _Pool, number: int) -> None:
        replica = pool.replicas[number]
        now_s = replica.next_s
        ended = replica.wake()
        for leg in replica.begun:
            pool.pending[number] -= self._counted[leg].begin()
        for leg in ended:
            self._end_leg(pool, number, leg, now_s)
        self._push(replica.next_s, pool, number)

    # -- requests ------------------------------------------------------------------------------

    def _arrive(self, at_s: float, ask: Ask) -> None:
        served = Served(ask=ask, arrival_s=at_s)
        self._served.append(served)
        goes_on = self._second is not None and ask.output_tokens > 1
        leg_ask = replace(ask, output_tokens=1) if goes_on else ask
        wanted = Wanted(
            prompt_tokens=ask.prompt_tokens,
            answer_tokens=0 if self._second is not None else int(self._usual_tokens),
            prefixes=prefixes_of(ask, self._fleet.prefix_tokens),
            session=None if ask.session is None else key_of("session", ask.session),
        )
        number, counted = self._first.send(wanted, self._chooser.random())
        leg = Served(ask=leg_ask, arrival_s=at_s, replica=number)
        served.replica = number
        self._legs[leg], self._counted[leg] = served, counted
        self._first.replicas[number].offer(leg, at_s)
        self._push(self._first.replicas[number].next_s, self._first, number)

    def _end_leg(self, pool: _Pool, number: int, leg: Served, now_s: float) -> None:
        served = self._legs.pop(leg)
        pool.pending[number] -= self._counted.pop(leg).tokens
        if pool is self._first:
            served.started_s, served.first_s = leg.started_s, leg.first_s
            served.cached_tokens, served.refused = leg.cached_tokens, leg.refused
            self._scale.came(served)
            if leg.refused is None and leg.tokens < served.ask.output_tokens:
                self._hand_over(served, number, now_s)
                return
        served.end_s, served.refused = leg.end_s, leg.refused
        if leg.refused is None:
            served.tokens = served.ask.output_tokens
            self._usual_tokens += SMOOTHING * (served.tokens - self._usual_tokens)
        self._feed.ended(served.ask, served.end_s or now_s)

    def _hand_over(self, served: Served, sender: int, now_s: float) -> None:
        """The prompt is computed, and so is the first token; the rest is the other pool's."""
        assert self._second is not None
        assert self._fleet.decode is not None
        while len(self._links) <= sender:
            self._links.append(Link(self._fleet.decode.handover))
        ask = replace(
            served.ask,
            prompt_tokens=served.ask.prompt_tokens + 1,
            output_tokens=served.ask.output_tokens - 1,
        )
        wanted = Wanted(prompt_tokens=ask.prompt_tokens, answer_tokens=int(self._usual_tokens))
        number, counted = self._second.send(wanted, self._chooser.random())
        leg = Served(ask=ask, arrival_s=now_s, replica=number)
        self._legs[leg], self._counted[leg] = served, counted
        arrived_s = self._links[sender].send(served.ask.prompt_tokens, now_s)
        replica = self._second.replicas[number]
        replica.hand_over(leg, arrived_s)
        self._push(replica.next_s, self._second, number)

    # -- size ----------------------------------------------------------------------------------

    def _start(self, now_s: float, cold_s: float) -> None:
        number = self._first.add(now_s + cold_s)
        self._scale.started(number, now_s, now_s + cold_s)
        if not cold_s:
            self._open_ready(now_s)

    def _open_ready(self, now_s: float) -> None:
        for number in self._scale.take_ready(now_s):
            self._first.open(number)

    def _decide(self, now_s: float) -> None:
        """Add or take away replicas, as the rules say."""
        rules = self._fleet.scaling
        assert rules is not None
        self._open_ready(now_s)
        self._scale.end_drained(now_s, self._first.replicas)
        seen = self._scale.seen(
            now_s, self._first.ready, self._first.replicas, self._fleet.ttft_s, rules
        )
        wanted = wanted_replicas(rules, seen)
        for _ in range(wanted - seen.ready - seen.starting):
            self._start(now_s, self._fleet.cold_start_s)
        if wanted < seen.ready:
            self._scale.draining(self._first.drain(), now_s)
        if self._feed.next_s is not None or self._legs:
            # A replica that starts meanwhile is opened when it is ready, not a decision later.
            next_s = min(now_s + rules.interval_s, self._scale.next_ready_s)
            self._push(next_s, None, 0)

    def _report(self) -> FleetReport:
        pools = [self._first] + ([self._second] if self._second is not None else [])
        stats = [each.stats for pool in pools for each in pool.replicas]
        end_s = max((each.end_s or 0.0 for each in self._served), default=0.0)
        second_s = len(self._second.replicas) * end_s if self._second is not None else 0.0
        return FleetReport(
            served=tuple(self._served),
            steps=sum(each.steps for each in stats),
            preemptions=sum(each.preemptions for each in stats),
            draft_tokens=sum(each.drafts.draft_tokens for each in stats),
            accepted_tokens=sum(each.drafts.accepted_tokens for each in stats),
            busy_s=math.fsum(each.compute_s for each in stats),
            replica_s=self._scale.replica_s(end_s) + second_s,
            sizes=tuple(self._scale.sizes),
        )
