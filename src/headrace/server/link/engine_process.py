"""The engine process: a model, the engine's loop, and a socket to the HTTP process.

    python -m headrace.server.link.engine_process FD

Each turn of the loop reads messages, computes a step, and sends its tokens. A second thread only
reports, twice a second, the progress of loop and runner: if that stops, the HTTP process restarts
this one. Ends when the socket is closed. Knows token ids; no text, no HTTP.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

from headrace.core import collector
from headrace.core.constraint import Constraint
from headrace.core.errors import (
    ContextLengthError,
    HeadraceError,
    InvalidRequestError,
    RetryLaterError,
)
from headrace.core.request import GenerateRequest
from headrace.core.server_config import Role
from headrace.server.grammars.host import Starter
from headrace.server.grammars.places import Grammars
from headrace.server.grammars.process import Setup
from headrace.server.handover.setup import HandoverSetup
from headrace.server.link import wire
from headrace.server.link.frames import Encoder
from headrace.server.link.snapshot import ledger_parts, take_snapshot
from headrace.server.link.work import work_facts
from headrace.server.observe.logs import set_up_logging

if TYPE_CHECKING:  # imported once logging is set up
    from headrace.assemble import Assembled
    from headrace.server.handover.desk import Desk

BEAT_S = 0.5
IDLE_S = 0.25  # longest sleep of the loop: each turn counts as progress
READ_BYTES = 1 << 20
TIDY_TURNS = 16

log = logging.getLogger(__name__)


class Link:
    """The socket, sending and receiving whole messages. Two threads send."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._encoder = Encoder()
        self._decoder = wire.to_engine_decoder()
        self._lock = threading.Lock()
        self.closed = False

    def send(self, message: wire.FromEngine) -> None:
        with self._lock:
            try:
                self._socket.sendall(self._encoder.frame(message))
            except OSError:  # the HTTP process is gone
                self.closed = True

    def receive(self, timeout_s: float, *others: int) -> list[wire.ToEngine]:
        """The messages received; waits at most `timeout_s` for them, or until one of the other
        descriptors is readable."""
        own = self._socket.fileno()
        poll = select.poll()  # not select(), which fails for descriptors above 1023
        for descriptor in (own, *others):
            poll.register(descriptor, select.POLLIN)
        if not any(descriptor == own for descriptor, _ in poll.poll(timeout_s * 1000)):
            return []
        try:
            data = self._socket.recv(READ_BYTES)
        except OSError:
            data = b""
        if not data:
            self.closed = True
        return list(self._decoder.feed(data))


class EngineProcess:
    def __init__(self, link: Link) -> None:
        self._link = link
        self._turns = 0
        self._publish_s = 0.0  # time spent sending results, over all steps
        self._ended = threading.Event()
        self._grammars: Grammars
        self._desk: Desk
        # Requests that are open, from Add to Cancel or Refused.
        self._numbers: dict[str, int] = {}
        self._ids: dict[int, str] = {}

    def run(self) -> int:
        configure = self._first_message()
        if configure is None:
            return 0
        set_up_logging(configure.log_level, configure.log_format)
        from headrace.assemble import assemble

        began = time.perf_counter()
        try:
            self._assembled = assemble(
                configure.model_path,
                config=configure.engine,
                offline=True,
                checked=configure.checked,
            )
            self._desk = _open_desk(configure.handover, self._assembled)
        except HeadraceError as error:
            self._link.send(wire.Broken(error.cause, error.remedy, error.detail))
            return 2
        self._engine = self._assembled.engine
        setup = Setup(
            str(self._assembled.model_path),
            configure.engine.load_format,
            self._assembled.spec.vocab_size,
        )
        self._grammars = Grammars(Starter(setup), most_bytes=configure.grammars_bytes)
        collector.settle()
        self._link.send(wire.Phase("weights", time.perf_counter() - began))
        limits = self._assembled.runner.limits
        self._link.send(
            wire.Ready(
                context_tokens=limits.context_tokens,
                max_sequences=limits.max_sequences,
                total_blocks=limits.total_blocks,
                block_tokens=limits.block_tokens,
                ledger_bytes=ledger_parts(self._assembled.ledger, self._assembled.allocated),
                notes=list(self._assembled.notes),
                pid=os.getpid(),
                backend=self._assembled.backend.facts(configure.engine),
                work=work_facts(self._assembled.spec, self._assembled.ledger),
                max_batch_tokens=limits.max_batch_tokens,
                max_step_growth=self._engine.scheduler.config.max_step_growth,
                speculate=self._assembled.config.speculate or "off",
                handover_port=self._desk.port,
                handover_fingerprint=self._desk.fingerprint,
            )
        )
        beat = threading.Thread(target=self._beat, name="headrace-beat", daemon=True)
        beat.start()
        try:
            with collector.rarely():
                self._loop()
            if self._engine.lost is not None:
                return 3
        finally:
            self._ended.set()
            self._grammars.close()
            self._desk.close()
            beat.join()
            self._assembled.close()
            collector.unsettle()
        return 0

    def _first_message(self) -> wire.Configure | None:
        while not self._link.closed:
            for message in self._link.receive(IDLE_S):
                if isinstance(message, wire.Configure):
                    return message
        return None

    def _loop(self) -> None:
        link, engine, grammars, desk = self._link, self._engine, self._grammars, self._desk
        while not link.closed:
            wait_s = 0.0 if engine.has_work else IDLE_S
            for message in link.receive(wait_s, *grammars.filenos(), *desk.filenos()):
                if isinstance(message, wire.Shutdown):
                    return
                self._obey(message)
            for request in desk.turn():
                self._start(request)
            if not grammars.is_idle:
                self._add_compiled()
            if engine.has_work:
                tokens, started = engine.step(), engine.take_started()
                desk.heard(tokens)
                if tokens or started:
                    began = time.perf_counter()
                    link.send(wire.Tokens.of(tokens, started, self._numbers))
                    self._publish_s += time.perf_counter() - began
                if engine.lost is not None:
                    # Requests of the failed step have their error; the HTTP process fails the rest.
                    log.error("the engine ends: %s", engine.lost)
                    return
                # Should blocks ever leak, this process ends here and its successor starts afresh.
                engine.idle_check()
            if self._turns % TIDY_TURNS == 0:
                grammars.tidy()
            self._turns += 1

    def _obey(self, message: wire.ToEngine) -> None:
        if isinstance(message, wire.Add):
            self._open(message.number, message.request, message.prefill)
        elif isinstance(message, wire.Cancel):
            if (request_id := self._close(message.number)) is not None:
                self._grammars.forget(request_id)
                self._desk.forget(request_id)
                self._engine.cancel(request_id)
        elif isinstance(message, wire.StopOne) and message.number in self._ids:
            self._engine.stop(self._ids[message.number], message.index)

    def _open(self, number: int, request: GenerateRequest, prefill: str) -> None:
        if request.request_id in self._numbers:
            cause = f"The request id {request.request_id!r} is in use; expected a new one."
            self._refuse(number, InvalidRequestError(cause, "Choose another id."))
            return
        self._numbers[request.request_id] = number
        self._ids[number] = request.request_id
        if not self._desk.fetch(request, prefill):
            self._start(request)

    def _start(self, request: GenerateRequest) -> None:
        if request.grammar is None:
            self._add(request, None)
        else:
            self._grammars.submit(request)

    def _close(self, number: int) -> str | None:
        request_id = self._ids.pop(number, None)
        if request_id is not None:
            del self._numbers[request_id]
        return request_id

    def _add_compiled(self) -> None:
        for compiled in self._grammars.take():
            if isinstance(compiled.result, HeadraceError):
                self._refuse(self._numbers[compiled.request.request_id], compiled.result)
            else:
                self._add(compiled.request, compiled.result)

    def _add(self, request: GenerateRequest, constraint: Constraint | None) -> None:
        try:
            self._engine.add(request, constraint)
        except HeadraceError as error:
            self._refuse(self._numbers[request.request_id], error)

    def _refuse(self, number: int, error: HeadraceError) -> None:
        self._close(number)
        self._link.send(
            wire.Refused(
                number=number,
                status=error.status,
                cause=error.cause,
                remedy=error.remedy,
                param=error.param,
                is_context_length=isinstance(error, ContextLengthError),
                retry_after_s=error.retry_after_s if isinstance(error, RetryLaterError) else None,
            )
        )

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            progress = self._turns + self._engine.progress
            snapshot = take_snapshot(
                self._engine, self._publish_s, self._grammars.stats, self._desk.counts
            )
            self._link.send(wire.Beat(progress, snapshot))


def _open_desk(setup: HandoverSetup, assembled: Assembled) -> Desk:
    from headrace.server.handover.desk import Desk
    from headrace.server.handover.identity import kv_fingerprint

    fingerprint = "" if setup.role is Role.BOTH else kv_fingerprint(assembled)
    return Desk(setup, assembled.engine, fingerprint, assembled.spec.vocab_size)


def main() -> int:
    # The HTTP process decides when to stop: a Ctrl-C on the terminal reaches both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return EngineProcess(Link(socket.socket(fileno=int(sys.argv[1])))).run()


if __name__ == "__main__":
    sys.exit(main())
