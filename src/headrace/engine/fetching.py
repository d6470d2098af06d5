"""Blocks between the pool and a store that outlives the engine (core/block_store.py).

A request whose prefix is in the store and not in the pool waits outside the queue until its blocks
have come, and no longer than LOAD_S: others are computed meanwhile. Then they are adopted between
two steps, and the request is queued at the place of its arrival. Blocks that become full are given
to the store when the step is committed. Whatever the store does or fails to do, it only changes
what has to be computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from headrace.core.block_store import BlockStore, Load
from headrace.core.clock import Clock
from headrace.core.request import ONCE
from headrace.core.step import Contents, MovesBlocks
from headrace.engine.blocks import BlockPool
from headrace.engine.prefix import PrefixCache
from headrace.engine.roster import Roster
from headrace.engine.sequence import Sequence as EngineSequence

log = logging.getLogger(__name__)

LOAD_S = 2.0  # the longest wait for a load: a disk that is slower than this is no help
MOST_LOAD_BYTES = 1 << 30  # of one request: it is in memory twice until it is adopted
SOME_BYTES = 32 << 20  # adopted between two steps while others wait for the next one
READ_BLOCKS = 8  # given to the store at a time: it may have enough after some

Adopt = Callable[[Sequence[bytes], Mapping[bytes, Contents]], int]


@dataclass(slots=True)
class _Fetch:
    load: Load
    first: bytes  # the first key that it loads
    until_s: float
    waiting: list[EngineSequence] = field(default_factory=list)
    has_ended: bool = False  # the load
    served: int = 0  # of those that wait, the first so many have all that came


class Fetching:
    def __init__(
        self,
        store: BlockStore,
        runner: MovesBlocks,
        pool: BlockPool,
        prefix: PrefixCache,
        roster: Roster,
        clock: Clock,
        adopt: Adopt,
    ) -> None:
        self.store = store
        self._runner = runner
        self._pool = pool
        self._prefix = prefix
        self._roster = roster
        self._clock = clock
        self._adopt = adopt
        self._fetches: dict[bytes, _Fetch] = {}  # by their first key
        self._most_blocks = max(1, MOST_LOAD_BYTES // runner.block_bytes)
        self._some_blocks = max(1, SOME_BYTES // runner.block_bytes)
        self._has_failed = False
        self._new: list[tuple[bytes, int]] = []
        prefix.new = self._new

    def __len__(self) -> int:
        return len(self._fetches)

    # -- from the store ------------------------------------------------------------------------

    def begin(self, sequence: EngineSequence) -> bool:
        """A request arrives. Whether it has to wait until blocks of its prefix are loaded."""
        request = sequence.request
        is_scored = request.params.prompt_logprobs is not None
        if request.embed or is_scored or request.cache_salt.startswith(ONCE):
            return False  # nothing is found for these, see starting.py
        keys = sequence.keys
        found = self._prefix.match(sequence.token_ids, keys, request.cache_salt)
        self.store.use(keys)
        # Blocks that were dropped when they were new, if they are in use again.
        self._keep(list(zip(keys, found, strict=False)))
        last = (len(sequence.token_ids) - 1) // self._pool.block_tokens
        most = min(self._most_blocks, self._pool.total_blocks)
        missing = list(takewhile(self.store.has, keys[len(found) : last][:most]))
        if not missing:
            return False
        fetch = self._fetches.get(missing[0])
        if fetch is None:
            until_s = self._clock.now_s() + LOAD_S
            fetch = _Fetch(self.store.load(missing), missing[0], until_s)
            self._fetches[fetch.first] = fetch
        fetch.waiting.append(sequence)
        return True

    def settle(self, wait_s: float) -> None:
        """Adopt what was loaded, and queue those that waited for it. Waits for the first load."""
        for fetch in list(self._fetches.values()):
            fetch.waiting = [each for each in fetch.waiting if not each.is_finished]
            if self._has_come(fetch, wait_s) and self._adopt_some(fetch):
                del self._fetches[fetch.first]
                for sequence in fetch.waiting:
                    self._roster.resume(sequence)
            wait_s = 0.0

    def _has_come(self, fetch: _Fetch, wait_s: float) -> bool:
        """Whether its load has ended, or is not waited for any longer."""
        if fetch.has_ended:
            return True
        left_s = fetch.until_s - self._clock.now_s()
        ended = fetch.load.wait(max(0.0, min(wait_s, left_s)) if fetch.waiting else 0.0)
        is_late = self._clock.now_s() >= fetch.until_s
        if not ended and fetch.waiting and not is_late:
            return False
        if not ended:
            fetch.load.give_up(is_late=is_late)
            self.store.stats.late_loads += is_late
        fetch.has_ended = True
        return True

    def _adopt_some(self, fetch: _Fetch) -> bool:
        """Adopt some of what came, or all if nobody has to wait for that. Whether that was all."""
        contents, size = fetch.load.contents, self._pool.block_tokens
        if not contents:
            return True
        for sequence in fetch.waiting[fetch.served :]:
            last = (len(sequence.token_ids) - 1) // size
            salt = sequence.request.cache_salt
            before = len(self._prefix.match(sequence.token_ids, sequence.keys, salt))
            most = before + self._some_blocks if self._roster.running else last
            after = self._try_adopt(sequence.keys[: min(most, last)], contents)
            self.store.stats.hits_tokens += max(0, after - before) * size
            if before < after == most < last and self._clock.now_s() < fetch.until_s:
                return False
            fetch.served += 1
        return True

    def _try_adopt(self, keys: Sequence[bytes], contents: Mapping[bytes, Contents]) -> int:
        try:
            return self._adopt(keys, contents)
        except Exception as error:  # a lost device says so again in the next step
            self._note("put into", error)
            return 0

    # -- to the store --------------------------------------------------------------------------

    def keep_new(self) -> None:
        """Give the store what became full. Before the next plan is made, which may reuse these
        blocks."""
        if self._new:
            self._keep(self._new)
            self._new.clear()

    def _keep(self, pairs: list[tuple[bytes, int]]) -> None:
        for at in range(0, len(pairs), READ_BLOCKS):
            some = pairs[at : at + READ_BLOCKS]
            wanted = [(key, block) for key, block in some if self.store.wants(key)]
            if not wanted:
                continue
            try:
                copies = self._runner.read_blocks([block for _, block in wanted])
            except Exception as error:
                self._note("read from", error)
                return
            for (key, _), copy in zip(wanted, copies, strict=True):
                self.store.keep(key, copy)

    def _note(self, what: str, error: Exception) -> None:
        self.store.stats.errors["write" if what == "read from" else "read"] += 1
        if not self._has_failed:
            self._has_failed = True
            log.warning("blocks could not be %s the KV pool: %s", what, error, exc_info=error)
