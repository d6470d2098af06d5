"""One replica's process as the router's process sees it: started, ready, retired, ended.

Lives as long as the process; slot.py makes another for its successor. Knows processes and messages;
no fleet and no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence

import msgspec

from headrace.core.children import child_environment, python_command
from headrace.core.errors import HeadraceError
from headrace.replicas import messages
from headrace.server.api.responses.store import StoredResponse
from headrace.server.link.frames import Encoder

READ_BYTES = 1 << 18
RETIRE_S = 5.0  # for the answer to Retire
COMMAND = tuple(python_command("headrace.replicas.process"))

log = logging.getLogger(__name__)

Told = Callable[[messages.FromReplica], None]


class Child:
    """Made by `start`. `begun` is set when the process is ready or, for one that only looks, has
    found that all is well; it raises StartError where it failed."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        told: Told,
    ) -> None:
        self._process, self._reader, self._writer, self._told = process, reader, writer, told
        self._encoder = Encoder()
        self._decoder = messages.from_replica_decoder()
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[messages.Ready | messages.Fits] = loop.create_future()
        self._stored: asyncio.Future[Mapping[str, StoredResponse]] = loop.create_future()
        self._pump = asyncio.create_task(self._read_all())
        self.ended = asyncio.create_task(self._end())

    @classmethod
    async def start(
        cls,
        begin: messages.Begin,
        *,
        listening: socket.socket | None = None,
        gpus: Sequence[str] = (),
        told: Told = lambda message: None,
        command: Sequence[str] = COMMAND,
    ) -> Child:
        """`listening` is bound, and the process gets it; it may be closed here afterwards."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        passed = [theirs.fileno()]
        if listening is not None:
            passed.append(listening.fileno())
            begin = msgspec.structs.replace(begin, socket=listening.fileno())
        process = None
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                str(theirs.fileno()),
                pass_fds=passed,
                stdin=asyncio.subprocess.DEVNULL,
                env=_environment(gpus),
                start_new_session=True,  # a terminal's Ctrl-C is for the router's process alone
            )
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            if process is not None:
                process.kill()
            raise
        finally:
            theirs.close()
        child = cls(process, reader, writer, told)
        child._send(begin)
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not self.ended.done()

    def _send(self, message: messages.ToReplica) -> None:
        if not self._writer.is_closing():
            self._writer.write(self._encoder.frame(message))

    async def retire(self) -> Mapping[str, StoredResponse]:
        """What its successor should know. Empty where it does not answer."""
        self._send(messages.Retire())
        with contextlib.suppress(TimeoutError, HeadraceError):
            async with asyncio.timeout(RETIRE_S):
                return await asyncio.shield(self._stored)
        return {}

    async def stop(self, limit_s: float) -> None:
        """Asks it to end, and kills it if it does not."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            await asyncio.wait({self.ended}, timeout=limit_s)
        self.kill()
        await asyncio.wait({self.ended})

    def kill(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    # -- inside ----------------------------------------------------------------------------------

    async def _end(self) -> str:
        """How it ended, in words."""
        status = await self._process.wait()
        await self._pump
        words = f"was killed by signal {-status}" if status < 0 else f"ended with {status}"
        gone = messages.StartError(
            f"A replica's process {words} before it was ready.", "The log above says why."
        )
        for waited in (self.begun, self._stored):
            if not waited.done():
                waited.set_exception(gone)
            waited.exception()  # there may be no waiter
        return words

    async def _read_all(self) -> None:
        try:
            while data := await self._reader.read(READ_BYTES):
                for message in self._decoder.feed(data):
                    self._hear(message)
        except ConnectionError:
            log.debug("a replica's socket was reset")
        except (msgspec.MsgspecError, HeadraceError) as error:
            log.error("a replica sent a message that could not be decoded; killing it: %s", error)
            self.kill()
        finally:
            self._writer.close()

    def _hear(self, message: messages.FromReplica) -> None:
        if isinstance(message, messages.Stored):
            if not self._stored.done():
                self._stored.set_result(message.responses)
        elif isinstance(message, messages.Failed):
            if not self.begun.done():
                self.begun.set_exception(messages.error_of(message))
                self.begun.exception()
            else:
                log.error("a replica ends: %s", message.cause, extra={"event": "replica_failed"})
        elif isinstance(message, messages.Ready | messages.Fits):
            if not self.begun.done():
                self.begun.set_result(message)
        else:
            self._told(message)


def _environment(gpus: Sequence[str]) -> dict[str, str]:
    """All of it: it is a server, and sends traces, say, as OTEL_* tell it. Settings come with the
    first message."""
    environment = {**os.environ, **child_environment()}
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return environment
