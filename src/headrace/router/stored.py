"""Which replica has a stored answer of /v1/responses: its id is read from the answer's beginning.

An id that is not known (the router was started anew, another router passed it on) is asked of one
replica after the other, while they say 404. Answers belong to the key that asked for them, though
replicas see one key. Knows ids; no HTTP.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from headrace.core.errors import HeadraceError

PATH = "/v1/responses"
MOST_IDS = 65536
LOOKED_AT_BYTES = 4096  # of an answer
_ID = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_-]{1,100})"')


class NotStoredError(HeadraceError):
    status = 404


@dataclass(frozen=True, slots=True)
class Home:
    replica: int
    owner: str | None  # the key's name


class Stored:
    def __init__(self, most: int = MOST_IDS) -> None:
        self._most = most
        self._homes: OrderedDict[str, Home] = OrderedDict()

    def find(self, response_id: str, owner: str | None) -> int | None:
        """None: not known. Raises where it is another key's."""
        home = self._homes.get(response_id)
        if home is None:
            return None
        if home.owner != owner:
            raise NotStoredError(
                f"There is no stored answer {response_id[:100]!r}.",
                "It may be too old, or it was asked for with another key.",
            )
        self._homes.move_to_end(response_id)
        return home.replica

    def keep(self, response_id: str, home: Home) -> None:
        self._homes[response_id] = home
        self._homes.move_to_end(response_id)
        if len(self._homes) > self._most:
            self._homes.popitem(last=False)

    def reading(
        self, early: bytes, home: Home, write: Callable[[bytes], None]
    ) -> Callable[[bytes], None]:
        """What an answer's bytes are given to, after `early`, so that its id is remembered."""
        seen = early

        def look(data: bytes) -> bool:
            """Whether there is nothing more to look for."""
            nonlocal seen
            seen += data
            if found := _ID.search(seen):
                self.keep(found[1].decode("ascii"), home)
                return True
            return len(seen) > LOOKED_AT_BYTES

        is_over = look(b"")

        def pass_on(data: bytes) -> None:
            nonlocal is_over
            write(data)
            if not is_over:
                is_over = look(data)

        return write if is_over else pass_on
