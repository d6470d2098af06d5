"""Wakes a thread that waits in `poll`. Any thread may wake; one waits and clears."""

from __future__ import annotations

import contextlib
import socket
import threading


class Waker:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_awake = False
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        """Readable after `wake`, until `clear`."""
        return self._read.fileno()

    def wake(self) -> None:
        with self._lock, contextlib.suppress(OSError):  # closed: nobody waits
            if not self._is_awake:
                self._is_awake = True
                self._write.send(b"\0")

    def clear(self) -> None:
        """Costs nothing where nobody woke."""
        if self._is_awake:
            with self._lock, contextlib.suppress(OSError):
                self._is_awake = False
                self._read.recv(1)

    def close(self) -> None:
        self._read.close()
        self._write.close()
