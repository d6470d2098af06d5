"""Sequences that wait for admission: one queue per tenant, in the order of the policy's key.

Values in, values out; turns.py decides which tenant is next.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from headrace.core.config import SchedulerConfig
from headrace.engine.policy import admission_key
from headrace.engine.sequence import Sequence


class WaitingQueue:
    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._lanes: dict[str, _Lane] = {}  # without empty ones
        self._count = 0
        self.tokens = 0  # to compute before each can draw, as of when it was queued

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order."""
        return (sequence for lane in self._lanes.values() for sequence in lane)

    def count(self, tenant: str) -> int:
        lane = self._lanes.get(tenant)
        return 0 if lane is None else len(lane)

    def first(self, tenant: str) -> Sequence | None:
        """A tenant's first sequence."""
        lane = self._lanes.get(tenant)
        return None if lane is None else lane.first()

    def push(self, sequence: Sequence) -> None:
        key = admission_key(
            self._config,
            priority=sequence.request.priority,
            prompt_tokens=sequence.prompt_tokens,
            arrival_s=sequence.arrival_s,
            order=sequence.order,
        )
        tokens = len(sequence.token_ids) - sequence.computed_tokens
        lane = self._lanes.setdefault(sequence.request.tenant, _Lane())
        lane.push(key, sequence, tokens)
        self._count += 1
        self.tokens += tokens

    def remove(self, sequence: Sequence) -> None:
        lane = self._lanes.get(sequence.request.tenant)
        if lane is None or sequence.sequence_id not in lane.members:
            return
        self.tokens -= lane.remove(sequence)
        self._count -= 1
        if not len(lane):
            del self._lanes[sequence.request.tenant]


class _Lane:
    """A heap. Sequences removed from the middle are skipped when they reach the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], int, Sequence]] = []
        self.members: dict[int, int] = {}  # sequence ids, and how many tokens each has to compute

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Sequence]:
        return (s for _, _, s in self._heap if s.sequence_id in self.members)

    def push(self, key: tuple[float, int], sequence: Sequence, tokens: int) -> None:
        self.members[sequence.sequence_id] = tokens
        heapq.heappush(self._heap, (key, sequence.sequence_id, sequence))

    def first(self) -> Sequence | None:
        while self._heap:
            sequence = self._heap[0][2]
            if sequence.sequence_id in self.members:
                return sequence
            heapq.heappop(self._heap)
        return None

    def remove(self, sequence: Sequence) -> int:
        tokens = self.members.pop(sequence.sequence_id)
        if self._heap[0][2] is sequence:
            heapq.heappop(self._heap)
        elif len(self._heap) > 2 * len(self.members) + 16:
            self._heap = [item for item in self._heap if item[1] in self.members]
            heapq.heapify(self._heap)
        return tokens
