"""One engine process as the HTTP process sees it: requests in, their tokens out.

Lives as long as the process: when it dies, every open stream ends with an error and a new link is
made for its successor (supervisor.py). Knows messages and processes; no text, no HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import cast

import msgspec

from headrace.core.children import child_environment, python_command
from headrace.core.errors import (
    ClientTimeoutError,
    ContextLengthError,
    HeadraceError,
    InvalidRequestError,
    RetryLaterError,
    UnavailableError,
)
from headrace.core.request import GenerateRequest
from headrace.server.link import wire
from headrace.server.link.frames import Encoder
from headrace.server.link.snapshot import EngineSnapshot
from headrace.server.link.unread import Unread

READ_BYTES = 1 << 18
ENGINE_COMMAND = tuple(python_command("headrace.server.link.engine_process"))

OnStart = Callable[[float, int], None]  # seconds in the queue, cached tokens

log = logging.getLogger(__name__)


class RequestStream:
    """A request's tokens as they arrive. Leaving the `with` ends the request in any state."""

    def __init__(
        self,
        link: EngineLink,
        number: int,
        request: GenerateRequest,
        on_start: OnStart,
        prefill: str = "",
    ) -> None:
        self._link = link
        self.number = number
        self.request = request
        self.prefill = prefill  # an engine that computes its prompt
        self.on_start = on_start  # called when it leaves the engine's queue
        self.right_guesses = self.wrong_guesses = 0  # of tokens, that were checked so far
        self._arrived: list[wire.Row] = []
        self._error: HeadraceError | None = None
        self._news = asyncio.Event()

    async def tokens(self) -> list[wire.Row]:
        """All tokens since the last call; waits for at least one."""
        while not self._arrived:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        arrived, self._arrived = self._arrived, []
        self._link.unread.taken(self)
        return arrived

    def stop(self, index: int) -> None:
        self._link.send(wire.StopOne(self.number, index))

    def push(self, token: wire.Row) -> None:
        self._arrived.append(token)
        self._news.set()

    def fail(self, error: HeadraceError, *, is_now: bool = False) -> None:
        """Ends the stream with the error, after the tokens received so far or instead of them."""
        if is_now:
            self._arrived = []
        self._error = error
        self._news.set()

    def __enter__(self) -> RequestStream:
        self._link.open(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._link.close(self)


class EngineLink:
    """Made by `start`. `ready` is set when the engine reports that it is; `lost` ends the link."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_phase: Callable[[wire.Phase], None],
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._on_phase = on_phase
        self._encoder = Encoder()
        self._decoder = wire.from_engine_decoder()
        self._numbers = itertools.count()
        self._streams: dict[int, RequestStream] = {}
        self.unread = Unread()
        self.ready: asyncio.Future[wire.Ready] = asyncio.get_running_loop().create_future()
        self.on_snapshot: Callable[[EngineSnapshot], None] = lambda snapshot: None
        self.served = False  # a token has been received
        self._progress = -1
        self._progress_s = time.monotonic()
        self._pump = asyncio.create_task(self._read_all())

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        configure: wire.Configure,
        on_phase: Callable[[wire.Phase], None],
    ) -> EngineLink:
        """Run `command` with one more argument, the file descriptor of its end of the socket."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        process = None
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                env=child_environment(),
                start_new_session=True,  # a terminal's Ctrl-C is for the HTTP process alone
            )
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            if process is not None:
                process.kill()
            raise
        finally:
            theirs.close()
        link = cls(process, reader, writer, on_phase)
        link.send(configure)
        return link

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def open_requests(self) -> int:
        return len(self._streams)

    def send(self, message: wire.ToEngine) -> None:
        if not self._writer.is_closing():
            self._writer.write(self._encoder.frame(message))

    def open(self, stream: RequestStream) -> None:
        self._streams[stream.number] = stream
        self.send(wire.Add(stream.number, stream.request, stream.prefill))

    def close(self, stream: RequestStream) -> None:
        self.unread.taken(stream)
        if self._streams.pop(stream.number, None) is not None:
            self.send(wire.Cancel(stream.number))

    def stream(
        self,
        request: GenerateRequest,
        on_start: OnStart = lambda waited_s, cached_tokens: None,
        prefill: str = "",
    ) -> RequestStream:
        return RequestStream(self, next(self._numbers), request, on_start, prefill)

    def stuck_s(self) -> float:
        """Seconds since the engine last made progress."""
        return time.monotonic() - self._progress_s

    def forgive(self) -> None:
        """Reset the hang timer; this process was stalled."""
        self._progress_s = time.monotonic()

    async def lost(self) -> int:
        """Waits for the process to end and returns its exit status."""
        await self._pump
        return await self._process.wait()

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    async def shut_down(self, timeout_s: float) -> None:
        """Ask the process to end, and kill it if it does not."""
        self.send(wire.Shutdown())
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()
        self._writer.close()
        await self._pump

    def fail_streams(self, error: HeadraceError) -> None:
        for number, stream in self._streams.items():
            stream.fail(error)
            self.send(wire.Cancel(number))
        self._streams.clear()

    # -- what the engine says --------------------------------------------------------------------

    async def _read_all(self) -> None:
        try:
            while data := await self._reader.read(READ_BYTES):
                for message in self._decoder.feed(data):
                    self._hear(message)
        except ConnectionError:
            log.debug("the engine's socket was reset")
        except (msgspec.MsgspecError, HeadraceError) as error:
            log.error("the engine sent a message that could not be decoded; killing it: %s", error)
            self.kill()
        finally:
            self._writer.close()
            if not self.ready.done():
                self.ready.set_exception(
                    UnavailableError("The engine ended during its start.", retry_after_s=5.0)
                )
                self.ready.exception()  # marks it as retrieved: there may be no waiter

    def _end_slow(self, stream: RequestStream) -> None:
        stream.fail(
            ClientTimeoutError(
                "The answer was read more slowly than it was computed, and there is no room left "
                "for it.",
                "Read faster, or ask for less (max_tokens, n, logprobs).",
            ),
            is_now=True,
        )
        self.close(stream)

    def _hear(self, message: wire.FromEngine) -> None:
        if isinstance(message, wire.Tokens):
            self.served = True
            for number, waited_s, cached_tokens in message.started:
                if stream := self._streams.get(number):
                    stream.on_start(waited_s, cached_tokens)
            for number, right, wrong in message.drafted:
                if stream := self._streams.get(number):
                    stream.right_guesses += right
                    stream.wrong_guesses += wrong
            for number, token in message.rows():
                if stream := self._streams.get(number):  # else it was ended meanwhile
                    stream.push(token)
                    extra = token[-1]
                    entries = 1 if extra is None else 1 + extra.entries
                    if slowest := self.unread.add(stream, entries):
                        self._end_slow(cast("RequestStream", slowest))
        elif isinstance(message, wire.Beat):
            if message.progress != self._progress:
                self._progress, self._progress_s = message.progress, time.monotonic()
            if message.snapshot is not None:
                self.on_snapshot(message.snapshot)
        elif isinstance(message, wire.Refused):
            if stream := self._streams.pop(message.number, None):
                stream.fail(_error_of(message))
        elif isinstance(message, wire.Phase):
            self._on_phase(message)
        elif isinstance(message, wire.Ready):
            self._progress_s = time.monotonic()
            self.ready.set_result(message)
        elif isinstance(message, wire.Broken):
            error = HeadraceError(message.cause, message.remedy, detail=message.detail)
            self.ready.set_exception(error)


def _error_of(message: wire.Refused) -> HeadraceError:
    if message.retry_after_s is not None:
        later = RetryLaterError(
            message.cause,
            message.remedy,
            retry_after_s=message.retry_after_s,
            param=message.param,
        )
        later.status = message.status
        return later
    kind = ContextLengthError if message.is_context_length else InvalidRequestError
    error = kind(message.cause, message.remedy, param=message.param)
    error.status = message.status
    return error
