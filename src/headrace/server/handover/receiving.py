"""One hand-over on its way to the engine that asked: frames are read and checked, pieces wait.

A thread runs `Receiving`; the engine's loop takes the pieces (taker.py). Never more than PIECES of
them wait: who sends has to wait then too. Knows frames; no engine.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from headrace.core.request import GenerateRequest
from headrace.server.handover import frames
from headrace.server.handover.frames import Cause, End, HandoverError, Kind, Wanted
from headrace.server.handover.session import Peer, Wire
from headrace.server.handover.shared import Slots

PIECES = 4  # that may have come and not been taken, of one fetch


@dataclass(slots=True)
class Piece:
    first: int
    count: int
    data: memoryview
    slot: int | None  # to be given back
    buffer: bytearray | None  # likewise


class Fetch:
    """One prompt's blocks on their way. The loop and a thread share it."""

    def __init__(self, request: GenerateRequest, peer: Peer, keys: list[bytes], first: int) -> None:
        self.request, self.peer, self.keys, self.first = request, peer, keys, first
        self.began_s = time.monotonic()
        self.arrived: deque[Piece] = deque()
        self.room = threading.Semaphore(PIECES)
        self.wire: Wire | None = None
        self.is_left = False  # nobody waits for it
        self.end: End | None = None  # set last: nothing arrives afterwards
        self.has_said_end = False  # the other engine
        self.taken = first  # blocks that this engine has
        self.failure: Cause | None = None  # here, and not at the other end
        self.slots: Slots | None = None  # that blocks come in
        self.buffers: list[bytearray] = []  # that they came in, to be used again

    @property
    def is_over(self) -> bool:
        return self.end is not None and not self.arrived


class Receiving:
    """Frames of one hand-over, each checked, and pieces for the loop."""

    def __init__(
        self,
        fetch: Fetch,
        wanted: Wanted,
        wire: Wire,
        slots: Slots | None,
        wake: Callable[[], None],
    ) -> None:
        self._fetch, self._wanted, self._wire, self._slots = fetch, wanted, wire, slots
        self._wake = wake
        self._next = wanted.first_block
        self._buffer: bytearray | None = None  # of the frame that is being read
        count, size = wanted.piece_blocks, wanted.block_bytes
        self._most = {Kind.BEAT: 0, Kind.END: frames.MAX_END_BYTES}
        if slots is None:
            self._most[Kind.BLOCKS] = frames.blocks_bytes(count, size)
        else:
            self._most[Kind.PLACED] = frames.placed_bytes(count)

    def run(self) -> End:
        fetch = self._fetch
        while True:
            fetch.room.acquire()
            kind, payload = self._next_frame()
            if kind is Kind.END:
                end = frames.unpack_end(payload)
                fetch.has_said_end = True
                if end.cause is None and self._next < self._wanted.blocks:
                    raise HandoverError(Cause.BLOCKS, "it ended before the last block")
                return end
            piece = self._sent(payload) if kind is Kind.BLOCKS else self._placed(payload)
            self._next += piece.count
            fetch.arrived.append(piece)
            self._wake()

    def _next_frame(self) -> tuple[Kind, memoryview]:
        while True:
            if self._fetch.is_left:
                raise HandoverError(Cause.CUT, "nobody waits for it")
            kind, payload = self._wire.receive(self._most, self._memory)
            if kind is not Kind.BEAT:
                return kind, payload

    def _sent(self, payload: memoryview) -> Piece:
        found = frames.unpack_blocks(payload, self._wanted.block_bytes)
        self._check(found.first, found.keys)
        buffer, self._buffer = self._buffer, None
        return Piece(found.first, len(found.keys), found.data, None, buffer)

    def _memory(self, size: int) -> memoryview:
        """For blocks a buffer that was used before, if there is one: new memory costs about as much
        time as filling it."""
        if self._slots is not None or size <= frames.MAX_END_BYTES:
            return frames.fresh(size)
        if self._buffer is None:
            buffers = self._fetch.buffers
            self._buffer = buffers.pop() if buffers else bytearray(self._most[Kind.BLOCKS])
        return memoryview(self._buffer)[:size]

    def _placed(self, payload: memoryview) -> Piece:
        found = frames.unpack_placed(payload)
        self._check(found.first, found.keys)
        assert self._slots is not None
        data = self._slots.view(found.slot, len(found.keys) * self._wanted.block_bytes)
        if zlib.crc32(data) != found.checksum:
            raise HandoverError(Cause.CHECKSUM, "the checksum of blocks in shared memory is wrong")
        return Piece(found.first, len(found.keys), data, found.slot, None)

    def _check(self, first: int, keys: tuple[bytes, ...]) -> None:
        if first != self._next or list(keys) != self._fetch.keys[first : first + len(keys)]:
            raise HandoverError(Cause.BLOCKS, f"blocks from {first} on are not those asked for")
