"""One hand-over on its way from the engine that computes: pieces of blocks become frames.

A connection's thread runs `Sending`; the engine's loop fills the job (giver.py). Knows frames; no
engine.
"""

from __future__ import annotations

import select
import time
import zlib
from collections import deque

import numpy as np

from headrace.server.handover import frames
from headrace.server.handover.frames import Cause, End, HandoverError, Kind, Wanted
from headrace.server.handover.session import Wire
from headrace.server.handover.shared import Slots
from headrace.server.handover.waking import Waker

BEAT_S = 0.2
SEND_S = 5.0  # for an asker to read something
# Of one hand-over, that were copied and not sent: more than a step fills, because the next copy may
# have to wait for the next step.
COPIED_PIECES = 8
REQUEST_IDS = "handover-"  # an API's ids begin with other words


class Job:
    """One prompt that somebody asked for. The loop and a connection's thread share it."""

    def __init__(self, wanted: Wanted, keys: list[bytes], number: int) -> None:
        self.wanted = wanted
        self.keys = keys
        self.request_id = f"{REQUEST_IDS}{number}"
        self.next_block = wanted.first_block  # that was not copied yet
        self.is_added = False
        self.is_computed = False  # nothing more will become full
        self.is_left = False  # nobody waits for it any more
        self.end: End | None = None  # after the pieces below
        self.pieces: deque[tuple[int, list[bytes], list[memoryview]]] = deque()
        self.waker = Waker()

    @property
    def has_room(self) -> bool:
        return len(self.pieces) < COPIED_PIECES and self.end is None

    def finish(self, cause: Cause | None, text: str = "") -> None:
        if self.end is None:
            self.end = End(cause, text)
            self.waker.wake()


class Sending:
    """What a connection's thread does once a job is under way: pieces go out as they come."""

    def __init__(self, wire: Wire, job: Job, slots: Slots | None, loop: Waker) -> None:
        self._wire, self._job, self._slots = wire, job, slots
        self._loop = loop  # woken where there is room for the next piece
        self._free = [] if slots is None else list(range(slots.count))
        self._sent_bytes = 0
        wire.socket.settimeout(SEND_S)
        self._poll = select.poll()
        self._poll.register(wire.socket, select.POLLIN)
        self._poll.register(job.waker, select.POLLIN)

    def run(self) -> int:
        """Until the end was sent; returns the bytes of blocks. Raises where the asker leaves."""
        job, wire = self._job, self._wire
        beat_s = time.monotonic() + BEAT_S
        while True:
            job.waker.clear()
            while job.pieces and (self._slots is None or self._free):
                self._send(*job.pieces.popleft())
                self._loop.wake()
                beat_s = time.monotonic() + BEAT_S
            if job.end is not None and not job.pieces:
                wire.send(Kind.END, frames.pack_end(job.end))
                return self._sent_bytes
            wait_s = max(0.0, beat_s - time.monotonic())
            ready = {number for number, _ in self._poll.poll(wait_s * 1000)}
            if wire.socket.fileno() in ready:
                self._hear()
            if time.monotonic() >= beat_s:
                wire.send(Kind.BEAT)
                beat_s = time.monotonic() + BEAT_S

    def _hear(self) -> None:
        _, payload = self._wire.receive({Kind.FREED: frames.FREED_BYTES})
        slot = frames.unpack_freed(payload)
        if self._slots is None or slot >= self._slots.count or slot in self._free:
            raise HandoverError(Cause.FRAME, f"slot {slot} is not in use")
        self._free.append(slot)

    def _send(self, first: int, keys: list[bytes], contents: list[memoryview]) -> None:
        size = sum(map(len, contents))
        if self._slots is None:
            self._wire.send(Kind.BLOCKS, frames.pack_blocks(first, keys), *contents)
        else:
            slot = self._free.pop()
            at, checksum = 0, 0
            with self._slots.view(slot, size) as view:
                target = np.frombuffer(view, np.uint8)  # its copies let other threads run
                for content in contents:
                    target[at : at + len(content)] = np.frombuffer(content, np.uint8)
                    at += len(content)
                    checksum = zlib.crc32(content, checksum)
                del target
            self._wire.send(Kind.PLACED, frames.pack_placed(first, keys, slot, checksum))
        self._sent_bytes += size
