"""Work for a thread that is done one at a time, a few may wait for, and whose answers are kept."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from headrace.core.errors import UnavailableError

MOST_WAITING = 8
KEPT = 64


class Turns:
    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()

    async def answer(self, asked: Hashable, work: Callable[[], Any]) -> Any:
        """What `work` gave when this was asked before, or gives now."""
        if asked in self._kept:
            return self._kept[asked]
        if self._waiting >= MOST_WAITING:
            raise UnavailableError("Too many questions of this kind at once.", retry_after_s=1)
        self._waiting += 1
        try:
            async with self._turn:
                if asked not in self._kept:
                    self._kept[asked] = await asyncio.to_thread(work)
                return self._kept[asked]
        finally:
            self._waiting -= 1
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
