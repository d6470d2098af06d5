"""Sequences that wait for admission, in the order of their policy's key. Values in, values out."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from headrace.core.config import SchedulerConfig
from headrace.engine.policy import admission_key
from headrace.engine.sequence import Sequence


class WaitingQueue:
    """A heap; what leaves from the middle is skipped when it comes to the top."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._heap: list[tuple[tuple[float, int], int, Sequence]] = []
        self._members: dict[int, int] = {}  # sequences, and what each has to compute
        self.tokens = 0  # to be computed before all of them could draw, as of when they queued

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order."""
        return (s for _, _, s in self._heap if s.sequence_id in self._members)

    def push(self, sequence: Sequence) -> None:
        key = admission_key(
            self._config,
            priority=sequence.request.priority,
            prompt_tokens=sequence.prompt_tokens,
            arrival_s=sequence.arrival_s,
            order=sequence.order,
        )
        tokens = len(sequence.token_ids) - sequence.computed_tokens
        self._members[sequence.sequence_id] = tokens
        self.tokens += tokens
        heapq.heappush(self._heap, (key, sequence.sequence_id, sequence))

    def first(self) -> Sequence | None:
        while self._heap:
            sequence = self._heap[0][2]
            if sequence.sequence_id in self._members:
                return sequence
            heapq.heappop(self._heap)
        return None

    def remove(self, sequence: Sequence) -> None:
        if sequence.sequence_id not in self._members:
            return
        self.tokens -= self._members.pop(sequence.sequence_id)
        if self._heap[0][2] is sequence:
            heapq.heappop(self._heap)
        elif len(self._heap) > 2 * len(self._members) + 16:
            self._heap = [item for item in self._heap if item[1] in self._members]
            heapq.heapify(self._heap)
