"""Wakes a thread that waits in `poll`. Any thread may wake; one waits and clears."""

from __future__ import annotations

import contextlib
import socket


class Waker:
    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        """Readable after `wake`, until `clear`."""
        return self._read.fileno()

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake; closed: nobody waits
            self._write.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(OSError):
            while len(self._read.recv(64)) == 64:
                pass

    def close(self) -> None:
        self._read.close()
        self._write.close()
