"""Finds out whether a client that has shut down its writing side still waits for the answer.

`nc` and others half-close after their request and wait; a client that left looks just the same, and
its request should be cancelled. To tell them apart, 100 Continue is sent, which every HTTP/1.1
client ignores: if the client is gone, its system answers with a reset. Knows a socket; nothing of
requests and answers.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable

PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
FIRST_LOOK_S, LONGEST_LOOK_S = 0.02, 1.0


class HalfClosed:
    """Watches until `stop`; calls `gone` once if the client has left."""

    def __init__(self, sock: socket.socket | None, gone: Callable[[], None]) -> None:
        self._socket = sock
        self._gone = gone
        self._loop = asyncio.get_running_loop()
        self._wait_s = FIRST_LOOK_S
        self._timer = self._loop.call_later(self._wait_s, self._look)

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        if self._socket is None or _is_reset(self._socket):
            self._gone()
            return
        self._wait_s = min(2 * self._wait_s, LONGEST_LOOK_S)
        self._timer = self._loop.call_later(self._wait_s, self._look)


def _is_reset(sock: socket.socket) -> bool:
    """Whether both directions are closed. Reading has ended already and can't tell."""
    if sock.fileno() < 0:
        return True
    if not hasattr(select, "poll"):
        return False
    poll = select.poll()
    poll.register(sock.fileno(), 0)  # resets and errors are always reported
    return bool(poll.poll(0))
