"""Ray Serve's choice of a replica by policies/routing.py: what is pending there against what of the
prompt would have to be computed.

One of these lives in every process that has a handle to the deployment, and counts what that
process has sent: with several ingress replicas each sees its own share. Ray's own queue lengths
still decide whether a replica accepts. Knows Ray's router; no HTTP.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from headrace.policies.prefixes import Caches
from headrace.policies.routing import BOUND, Rings, Routing, Wanted, key_of, route
from headrace.ray_serve.replica import Sent


class PrefixRequestRouter(RequestRouter):
    def initialize_state(
        self, policy: str = Routing.PREFIX.value, bound: float = BOUND, **unused: Any
    ) -> None:
        self._policy, self._bound = Routing(policy), bound
        self._caches = Caches()
        self._rings = Rings()
        self._pending: dict[int, int] = {}  # tokens by replica
        self._running: dict[str, tuple[int, int]] = {}  # request -> replica, tokens
        self._turn = 0

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        sent = _sent(pending_request)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # where all refuse
        by_number = {number_of(each.replica_id): each for each in candidate_replicas}
        tried = {int(each) for each in sent.tried}
        fresh = [number for number in by_number if number not in tried] or list(by_number)
        if not fresh:
            return []
        chosen = self._choose(sent, sorted(fresh))
        others = [by_number[number] for number in fresh if number != chosen]
        return [[by_number[chosen]], others] if others else [[by_number[chosen]]]

    def _choose(self, sent: Sent, numbers: list[int]) -> int:
        if len(numbers) == 1:
            return numbers[0]
        self._turn += 1
        return route(
            self._policy,
            sent.wanted,
            ring=self._rings.of(tuple(numbers)),
            pending={number: self._pending.get(number, 0) for number in numbers},
            caches=self._caches,
            turn=self._turn,
            tie=random.random(),
            bound=self._bound,
        )

    # -- counting --------------------------------------------------------------------------------

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        sent, number = _sent(pending_request), number_of(replica_id)
        sent.tried.append(str(number))
        name, wanted = pending_request.metadata.internal_request_id, sent.wanted
        tokens = wanted.counted(self._caches.held_tokens(number, wanted.prefixes)).tokens
        if self._policy is Routing.PREFIX:
            self._caches.sent(number, wanted.prefixes, wanted.tokens)
        self._running[name] = (number, tokens)
        self._pending[number] = self._pending.get(number, 0) + tokens

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        number, tokens = self._running.pop(internal_request_id, (0, 0))
        if number in self._pending:
            self._pending[number] -= tokens

    def update_replicas(self, replicas: list[RunningReplica]) -> Any:
        self._forget_others({number_of(each.replica_id) for each in replicas})
        return super().update_replicas(replicas)

    def _forget_others(self, numbers: Collection[int]) -> None:
        for number in self._pending.keys() - numbers:
            del self._pending[number]
            self._caches.forget(number)


def number_of(replica_id: ReplicaID) -> int:
    """The same in every process, so that all ingress replicas have the same ring."""
    return key_of(replica_id.unique_id)


def _sent(request: PendingRequest | None) -> Sent:
    for each in request.args if request is not None else ():
        if isinstance(each, Sent):
            return each
    return Sent(wanted=Wanted(prompt_tokens=1))
