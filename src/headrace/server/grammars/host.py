"""Grammar processes as the engine's loop sees them: started, followed token by token, killed.

`Starter` owns the process that forks, `Host` is one grammar's process, `RemoteWalk` is one
continuation in it. Nothing here waits longer than its timeout. The other end is process.py;
places.py decides which request gets a process, and when.
"""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import time
from collections.abc import Sequence

import msgspec

from headrace.core.children import child_environment, python_command
from headrace.core.constraint import Allowed, Foreseen, GrammarSpec
from headrace.core.errors import HeadraceError, InvalidRequestError
from headrace.server.grammars import messages
from headrace.server.grammars.process import (
    ANSWER_CPU_S,
    COMPILE_CPU_S,
    KILL,
    MEMORY_BYTES,
    ORDER_BYTES,
    START,
    Setup,
)
from headrace.server.link.frames import Encoder

# On a busy machine a process may have to wait for CPU time; one that gets none is given up.
ANSWER_WAIT_S = 4.0 * ANSWER_CPU_S
READ_BYTES = 1 << 18


class Starter:
    """The process that forks: started when first needed, and restarted if it has ended."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._next = 0

    def start(self, spec: GrammarSpec) -> Host:
        """Starts a process for this grammar, without waiting for it."""
        number, self._next = self._next, self._next + 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            order = START + number.to_bytes(ORDER_BYTES - 1, "little")
            try:
                socket.send_fds(self._running(), [order], [theirs.fileno()])
            except OSError:  # it has ended: try once more with a new one
                self.close()
                socket.send_fds(self._running(), [order], [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return Host(self, number, ours, spec)

    def kill(self, number: int) -> None:
        """Kill the process with that number, if it is still running."""
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.sendall(KILL + number.to_bytes(ORDER_BYTES - 1, "little"))

    def close(self) -> None:
        """Ends the process and all that it forked."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1.0)
            self._process.kill()
            self._process.wait()
            self._process = None

    def _running(self) -> socket.socket:
        if self._control is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with theirs:
                self._process = subprocess.Popen(
                    [
                        *python_command("headrace.server.grammars.process"),
                        str(theirs.fileno()),
                        msgspec.json.encode(self._setup).decode(),
                    ],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=child_environment(),
                    start_new_session=True,
                )
            self._control = ours
        return self._control


class Host:
    """One grammar's process. `compiled` or `failed` is set by its first message; `is_gone` when it
    has ended, by itself or killed."""

    def __init__(
        self, starter: Starter, number: int, sock: socket.socket, spec: GrammarSpec
    ) -> None:
        self._starter = starter
        self._number = number
        self._socket = sock
        self._socket.setblocking(False)
        self._encoder = Encoder()
        self._decoder = messages.from_grammar_decoder()
        self._orders: list[messages.Order] = []
        self._unsent = bytearray(self._encoder.frame(messages.Begin(spec)))
        self._walks: dict[int, RemoteWalk] = {}
        self._next_walk = 0
        self._next_request = 0
        self.compiled: messages.Compiled | None = None
        self.failed: messages.Failed | None = None
        self.is_gone = False
        self.grown_bytes = 0
        self.seconds = 0.0  # spent compiling and following the grammar
        self.pump()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_idle(self) -> bool:
        """Whether no request is following the grammar now."""
        return not self._walks

    def open(self) -> RemoteWalk:
        """A request's first walk. Only after the grammar was compiled."""
        assert self.compiled is not None
        request, self._next_request = self._next_request, self._next_request + 1
        walk = self._new_walk(Allowed(self.compiled.mask))
        self._orders.append(messages.Open(walk.number, request))
        return walk

    def fork(self, source: RemoteWalk) -> RemoteWalk:
        walk = self._new_walk(source.known)
        self._orders.append(messages.Fork(walk.number, source.number))
        return walk

    def accept(self, walk: RemoteWalk, token_ids: Sequence[int]) -> None:
        self._orders.append(messages.Accept(walk.number, list(token_ids)))

    def foresee(self, walk: RemoteWalk, number: int, token_ids: Sequence[int], forced: int) -> None:
        self._orders.append(messages.Foresee(walk.number, number, list(token_ids), forced))

    def release(self, walk: RemoteWalk) -> None:
        if self._walks.pop(walk.number, None) is not None:
            self._orders.append(messages.Close(walk.number))
            if not self._walks:
                self.pump()  # the process may have ended

    def close(self) -> None:
        """Ends the process, and fails the walks that are still in it."""
        if not self.is_gone:
            self._starter.kill(self._number)  # it may be computing and not reading its socket
            self._end()

    def pump(self, wait_s: float = 0.0) -> None:
        """Send what is queued and read what has arrived, waiting at most that long."""
        if self.is_gone:
            return
        self._flush()
        if wait_s > 0:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            poll.poll(wait_s * 1000)
        while not self.is_gone:
            try:
                data = self._socket.recv(READ_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data = b""
            if not data:
                self._end()
                return
            for message in self._decoder.feed(data):
                self._hear(message)

    def _new_walk(self, allowed: Allowed | None) -> RemoteWalk:
        number, self._next_walk = self._next_walk, self._next_walk + 1
        walk = self._walks[number] = RemoteWalk(self, number, allowed)
        return walk

    def _flush(self) -> None:
        if self._orders and self.compiled is not None:
            self._unsent += self._encoder.frame(self._orders)
            self._orders = []
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except (BlockingIOError, InterruptedError):
            pass  # the socket is full: later
        except OSError:
            self._end()

    def _hear(self, message: messages.FromGrammar) -> None:
        if isinstance(message, messages.Failed):
            self.failed = message
            return
        self.grown_bytes = message.grown_bytes
        self.seconds += message.seconds
        if isinstance(message, messages.Compiled):
            self.compiled = message
        elif isinstance(message, messages.Sights):
            for sight in message.sights:
                if walk := self._walks.get(sight.walk):
                    walk.see(sight)
        else:
            for answer in message.answers:
                if walk := self._walks.get(answer.walk):
                    walk.hear(answer)

    def _end(self) -> None:
        self.is_gone = True
        self._socket.close()
        self._orders = []
        for walk in self._walks.values():
            walk.lose()


class RemoteWalk:
    """Implements `core.constraint.Constraint` with a process that may be slow, or be killed."""

    def __init__(self, host: Host, number: int, allowed: Allowed | None) -> None:
        self._host = host
        self.number = number
        self.known = allowed  # None: the process was asked and has not answered yet
        self._error: HeadraceError | None = None
        self._asked_s = 0.0
        self._look = 0  # the number of what was last asked to be foreseen
        self._looks = False  # whether it still counts
        self._seen: Foreseen | None = None

    def accept(self, *token_ids: int) -> None:
        if self._error is not None:
            raise self._error
        self.known = None
        self._looks, self._seen = False, None
        self._asked_s = time.monotonic()
        self._host.accept(self, token_ids)

    def foresee(self, *token_ids: int, forced: int = 0) -> None:
        self._look += 1
        self._looks, self._seen = True, None
        self._host.foresee(self, self._look, token_ids, forced)

    def foreseen(self, wait_s: float = 0.0) -> Foreseen | None:
        until_s = time.monotonic() + wait_s
        while self._looks and self._seen is None and self._error is None:
            left_s = until_s - time.monotonic()
            self._host.pump(left_s)
            if left_s <= 0:
                break
        return self._seen

    def see(self, sight: messages.Sight) -> None:
        if self._looks and sight.number == self._look:
            self._seen = Foreseen(sight.token_ids, sight.masks)

    def allowed(self, wait_s: float = 0.0) -> Allowed | None:
        until_s = time.monotonic() + wait_s
        while self.known is None and self._error is None:
            left_s = until_s - time.monotonic()
            self._host.pump(left_s)
            if left_s <= 0:
                break
        is_waiting = self.known is None and self._error is None
        if is_waiting and time.monotonic() - self._asked_s > ANSWER_WAIT_S:
            self._host.close()
        if self._error is not None:
            raise self._error
        return self.known

    def fork(self) -> RemoteWalk:
        if self._error is not None:
            raise self._error
        return self._host.fork(self)

    def close(self) -> None:
        self._host.release(self)

    def hear(self, answer: messages.Answer) -> None:
        if answer.error:
            if answer.is_own_fault:
                self._error = InvalidRequestError(answer.error, "Simplify the grammar.")
            else:
                remedy = "This is a mistake in Headrace: please report it."
                self._error = HeadraceError(answer.error, remedy)
        else:
            self.known = Allowed(answer.mask, is_stopped=not answer.mask)

    def lose(self) -> None:
        """Called when its process has ended."""
        self._error = InvalidRequestError(
            f"The grammar can't be followed any further: a token took more than {ANSWER_CPU_S} s, "
            f"or all of them more than {MEMORY_BYTES >> 20} MiB.",
            "Simplify the grammar.",
        )


def too_much(param: str) -> InvalidRequestError:
    """The error of a process that was killed while it compiled."""
    return InvalidRequestError(
        f"The grammar takes more than {COMPILE_CPU_S} s or {MEMORY_BYTES >> 20} MiB to compile.",
        "Simplify it.",
        param=param,
    )
