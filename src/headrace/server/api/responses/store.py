"""Stored answers of /v1/responses: in memory, bounded, each visible to its owner only.

Answers expire. Where there are too many, or too many bytes, the oldest of the owner with the most
are evicted: no client can evict another's. Nothing survives the process. Each answer is stored with
its whole conversation, so that evicting it does not affect later ones. Takes the clock as an
argument; knows no HTTP and not what is in the answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headrace.core.bounds import STORED_BYTES
from headrace.core.server_config import ServerConfig

ENTRY_BYTES = 512  # rough overhead of an entry


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    owner: str | None  # the name of a key; None where there are no keys
    response: bytes  # JSON, as it was sent
    input_items: bytes  # JSON: a list of all items that led to it
    stored_s: float = 0.0

    @property
    def size_bytes(self) -> int:
        return len(self.response) + len(self.input_items) + ENTRY_BYTES


class _Shelf:
    """One owner's entries."""

    def __init__(self) -> None:
        self.ids: dict[str, None] = {}  # oldest first
        self.bytes = 0


class ResponseStore:
    def __init__(
        self,
        *,
        max_responses: int,
        max_bytes: int,
        lifetime_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._stored: dict[str, StoredResponse] = {}  # oldest first
        self._shelves: dict[str | None, _Shelf] = {}
        self._size_bytes = 0
        self.tag = ""  # of the ids: says which of several replicas has a response

    @classmethod
    def from_config(cls, config: ServerConfig) -> ResponseStore:
        return cls(
            max_responses=config.max_stored_responses,
            max_bytes=config.max_stored_bytes,
            lifetime_s=config.response_lifetime_s,
        )

    @property
    def is_on(self) -> bool:
        return self._max_responses > 0

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def __len__(self) -> int:
        return len(self._stored)

    def put(
        self, response_id: str, *, owner: str | None, response: bytes, input_items: bytes
    ) -> bool:
        """Returns whether it was stored: not if it alone exceeds a limit."""
        new = StoredResponse(
            owner=owner, response=response, input_items=input_items, stored_s=self._clock()
        )
        if not self.is_on or new.size_bytes > min(self._max_bytes, STORED_BYTES.most):
            return False
        self._add(response_id, new)
        self._make_room()
        return True

    def _add(self, response_id: str, new: StoredResponse) -> None:
        self._stored[response_id] = new
        self._size_bytes += new.size_bytes
        shelf = self._shelves.setdefault(new.owner, _Shelf())
        shelf.ids[response_id] = None
        shelf.bytes += new.size_bytes

    def _make_room(self) -> None:
        self._forget_old()
        while len(self._stored) > self._max_responses or self._size_bytes > self._max_bytes:
            fullest = max(self._shelves.values(), key=self._share)
            self._drop(next(iter(fullest.ids)))

    def _share(self, shelf: _Shelf) -> float:
        """The fraction of the limits in use, by number or by size, whichever is more."""
        return max(len(shelf.ids) / self._max_responses, shelf.bytes / self._max_bytes)

    def entries(self) -> dict[str, StoredResponse]:
        """All of them, oldest first: for the process that follows this one."""
        self._forget_old()
        return dict(self._stored)

    def put_back(self, entries: Mapping[str, StoredResponse]) -> None:
        """What a process before this one had, with its age."""
        if self.is_on:
            for response_id, old in entries.items():
                self._add(response_id, old)
            self._make_room()

    def get(self, response_id: str, owner: str | None) -> StoredResponse | None:
        """None where there is none, or it is another owner's: the caller can't tell which."""
        self._forget_old()
        found = self._stored.get(response_id)
        return found if found is not None and found.owner == owner else None

    def delete(self, response_id: str, owner: str | None) -> bool:
        if self.get(response_id, owner) is None:
            return False
        self._drop(response_id)
        return True

    def _forget_old(self) -> None:
        oldest_s = self._clock() - self._lifetime_s
        for response_id in list(self._stored):
            if self._stored[response_id].stored_s > oldest_s:
                break
            self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        dropped = self._stored.pop(response_id)
        self._size_bytes -= dropped.size_bytes
        shelf = self._shelves[dropped.owner]
        del shelf.ids[response_id]
        shelf.bytes -= dropped.size_bytes
        if not shelf.ids:
            del self._shelves[dropped.owner]
