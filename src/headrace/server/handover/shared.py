"""Memory that two engines on one machine share while blocks are handed over: a few slots.

The engine that asks makes it, once, and uses it again and again; the other writes blocks into free
slots. It has no name and no file, so that nothing is left behind by a process that is killed, and
it can't be made smaller, so that nobody can make the other side fail by that. Linux only. Knows
bytes; neither frames nor blocks.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import sys

from headrace.server.handover.frames import Cause, HandoverError

IS_SUPPORTED = sys.platform == "linux"


class Slots:
    def __init__(self, memory: mmap.mmap, count: int, slot_bytes: int) -> None:
        self._memory = memory
        self.count, self.slot_bytes = count, slot_bytes
        self.descriptor = -1  # of those that were made here

    @classmethod
    def make(cls, count: int, slot_bytes: int) -> Slots:
        size = count * slot_bytes
        descriptor = os.memfd_create("headrace-handover", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            made = cls(mmap.mmap(descriptor, size), count, slot_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        made.descriptor = descriptor
        return made

    @classmethod
    def open(cls, descriptor: int, count: int, slot_bytes: int) -> Slots:
        """Those of another process; takes the descriptor. What can't be trusted is refused: a file
        that shrinks under a mapping kills who reads it."""
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if not seals & fcntl.F_SEAL_SHRINK:
                raise HandoverError(Cause.FRAME, "shared memory that can be made smaller")
            if os.fstat(descriptor).st_size < count * slot_bytes:
                raise HandoverError(Cause.FRAME, "shared memory that is smaller than was said")
            return cls(mmap.mmap(descriptor, count * slot_bytes), count, slot_bytes)
        except (OSError, ValueError) as error:
            raise HandoverError(Cause.FRAME, f"shared memory can't be used: {error}") from None
        finally:
            os.close(descriptor)

    def view(self, slot: int, size: int) -> memoryview:
        """The first `size` bytes of a slot. To be released before `close`."""
        if not (0 <= slot < self.count and 0 <= size <= self.slot_bytes):
            raise HandoverError(Cause.FRAME, f"slot {slot} with {size} bytes; there is no such")
        start = slot * self.slot_bytes
        with memoryview(self._memory) as whole:
            return whole[start : start + size]

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # a view is still in use: the memory goes with it
            self._memory.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
