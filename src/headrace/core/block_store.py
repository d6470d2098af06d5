"""A place that keeps KV blocks beyond an engine's life. Contents are opaque; keys are prefix keys.

No call waits for the place itself: what is there is known from memory, loads come later, and what
can't be kept is dropped and counted. Knows neither engines nor where blocks are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace.core.step import Contents


@dataclass(slots=True)
class StoreStats:
    """Since the process started, except for `stored_bytes`."""

    hits_tokens: int = 0  # of requests, loaded and adopted
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    written_blocks: int = 0
    written_bytes: int = 0
    dropped_blocks: int = 0  # not written: the queue was full, or the place failed
    evicted_blocks: int = 0
    late_loads: int = 0  # not waited for any longer: their tokens were computed
    errors: dict[str, int] = field(default_factory=lambda: {"read": 0, "write": 0, "corrupt": 0})
    stored_bytes: int = 0  # now, of all models


class Load(Protocol):
    """Blocks on their way from the place, in order."""

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended, for good or bad."""
        ...

    @property
    def contents(self) -> Mapping[bytes, Contents]:
        """What has come so far. After it has ended, or was given up, nothing is added."""
        ...

    def give_up(self, *, is_late: bool) -> None:
        """Nobody waits any longer: because it took too long, or for another reason."""
        ...


class BlockStore(Protocol):
    @property
    def stats(self) -> StoreStats: ...

    def has(self, key: bytes) -> bool:
        """Whether it can be loaded, as far as is known now."""
        ...

    def wants(self, key: bytes) -> bool:
        """Whether it should be given to `keep`: not if it is there, or there is no room in the
        queue, which counts as dropped."""
        ...

    def keep(self, key: bytes, content: Contents) -> None:
        """Write it when there is time. The content must not change any more."""
        ...

    def use(self, keys: Sequence[bytes]) -> None:
        """These were asked for: they are the last to be evicted."""
        ...

    def load(self, keys: Sequence[bytes]) -> Load: ...

    def close(self) -> None:
        """Write what is queued, within a bounded time."""
        ...
