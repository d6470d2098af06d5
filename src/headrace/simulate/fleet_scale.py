"""The account of a fleet's size: which replicas start, run and end, what they cost, and what a
decision about them is based on. Knows replicas' counts and requests' times; policies/ decides."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from headrace.policies.scaling import FleetSeen, ScalingRules
from headrace.simulate.replica import Replica
from headrace.simulate.report import quantile
from headrace.simulate.served import Served

REMEMBERED = 200  # first tokens that a decision looks at


class Scale:
    def __init__(self) -> None:
        self.sizes: list[tuple[float, int]] = []
        self._starting: list[tuple[float, int]] = []  # (ready at, replica)
        self._began_s: dict[int, float] = {}  # of replicas that have not ended
        self._draining: dict[int, float] = {}
        self._spent_s = 0.0  # by replicas that have ended
        self._ttfts_s: deque[float] = deque(maxlen=REMEMBERED)
        self._needed_s = 0.0  # when replicas were last added or needed

    # -- requests ------------------------------------------------------------------------------

    def came(self, served: Served) -> None:
        """A request has ended, or has been handed over."""
        if served.refused is None:
            self._ttfts_s.append(served.ttft_s)

    # -- replicas ------------------------------------------------------------------------------

    def started(self, replica: int, now_s: float, ready_s: float) -> None:
        self._began_s[replica] = now_s
        self._starting.append((ready_s, replica))
        self._note(now_s)

    def take_ready(self, now_s: float) -> list[int]:
        ready = [replica for ready_s, replica in self._starting if ready_s <= now_s]
        self._starting = [each for each in self._starting if each[0] > now_s]
        return ready

    @property
    def next_ready_s(self) -> float:
        return min((ready_s for ready_s, _ in self._starting), default=math.inf)

    def draining(self, replica: int, now_s: float) -> None:
        self._draining[replica] = now_s
        self._note(now_s)

    def end_drained(self, now_s: float, replicas: Sequence[Replica]) -> None:
        for number in [each for each in self._draining if not replicas[each].requests]:
            del self._draining[number]
            self._spent_s += now_s - self._began_s.pop(number)

    def replica_s(self, end_s: float) -> float:
        """The time of all replicas until now."""
        return self._spent_s + math.fsum(max(0.0, end_s - s) for s in self._began_s.values())

    def _note(self, now_s: float) -> None:
        size = len(self._began_s) - len(self._draining)
        if self.sizes and self.sizes[-1][0] == now_s:
            self.sizes.pop()
        self.sizes.append((now_s, size))

    # -- what a decision sees ------------------------------------------------------------------

    def seen(
        self,
        now_s: float,
        ready: Sequence[int],
        replicas: Sequence[Replica],
        ttft_s: float | None,
        rules: ScalingRules,
    ) -> FleetSeen:
        slots = sum(_slots(replicas[each]) for each in ready)
        taken = sum(min(_slots(replicas[each]), replicas[each].requests) for each in ready)
        headroom = None
        if ttft_s is not None and self._ttfts_s:
            headroom = (ttft_s - quantile(sorted(self._ttfts_s), 0.95)) / ttft_s
        busy = taken / slots if slots else 1.0
        waiting_s = self._waiting_s(replicas)
        if busy > rules.idle or waiting_s > 0.1 * rules.waiting_s * len(ready):
            self._needed_s = now_s
        return FleetSeen(
            ready=len(ready),
            starting=len(self._starting),
            waiting_prefill_s=waiting_s,
            busy=busy,
            headroom=headroom,
            calm_s=now_s - self._needed_s,
        )

    def _waiting_s(self, replicas: Sequence[Replica]) -> float:
        """Waiting prompt tokens, at the rate at which steps have computed prompts so far."""
        tokens = sum(each.stats.prompt_tokens for each in replicas)
        busy_s = math.fsum(each.stats.compute_s for each in replicas)
        waiting = sum(each.waiting_tokens for each in replicas)
        return waiting * busy_s / tokens if tokens else 0.0


def _slots(replica: Replica) -> int:
    limits = replica.setup.limits
    return min(limits.max_sequences, limits.max_batch_tokens)
