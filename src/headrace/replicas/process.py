"""A replica's process: an ordinary server, which reports to the router's process how it starts.

    python -m headrace.replicas.process FD

Ends with the router's process, however that ends: with the socket between them, and where the
system can be told to, even while it is stopped. Knows server/; nothing of the router.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.core.config import Device, LoadFormat
from headrace.core.errors import HeadraceError
from headrace.core.server_config import ServerConfig
from headrace.fetch.resolve import name_model, resolve_model
from headrace.fetch.verify import Checked, check_model
from headrace.replicas import messages
from headrace.server.link.frames import Encoder
from headrace.server.observe.logs import set_up_logging
from headrace.server.start.banner import Serving, StartUp

if TYPE_CHECKING:
    from headrace.server.request.service import Service

READ_BYTES = 1 << 18
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class Channel:
    """To the router's process. Several threads send."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._encoder = Encoder()
        self._decoder = messages.to_replica_decoder()
        self._lock = threading.Lock()
        self._service: Service | None = None

    def send(self, message: messages.FromReplica) -> None:
        with self._lock, contextlib.suppress(OSError):  # it is gone, and this process ends too
            self._socket.sendall(self._encoder.frame(message))

    def first(self) -> messages.Begin:
        while data := self._socket.recv(READ_BYTES):
            for message in self._decoder.feed(data):
                if isinstance(message, messages.Begin):
                    return message
        raise SystemExit(0)

    def follow(self, service: Service) -> None:
        self._service = service

    def watch(self) -> None:
        threading.Thread(target=self._watch, name="headrace-parent", daemon=True).start()

    def _watch(self) -> None:
        try:
            while data := self._socket.recv(READ_BYTES):
                for message in self._decoder.feed(data):
                    if isinstance(message, messages.Retire):
                        self.send(messages.Stored(self._stored()))
        except OSError:
            pass
        os._exit(1)  # the engine's process ends with the socket to this one

    def _stored(self) -> Any:
        return {} if self._service is None else self._service.responses.entries()


class ReportedStart(StartUp):
    """Sends what a server would print."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def phase(self, name: str, seconds: float, what: str = "") -> None:
        self._channel.send(messages.Phase(name, seconds, what))

    def engine_ready(self, seconds: float, pid: int) -> None:
        self._channel.send(messages.Phase("engine", seconds, f"pid {pid}"))

    def note(self, text: str) -> None:
        self._channel.send(messages.Note(text))

    def ready(self, serving: Serving) -> None:
        self._channel.send(
            messages.Ready(
                serving.model,
                serving.fingerprint,
                serving.context_tokens,
                serving.kv_tokens,
                serving.has_chat,
            )
        )


def main() -> int:
    _end_with_parent()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    begin = channel.first()
    channel.watch()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the router's process decides
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _name_log_lines(begin.number)
    set_up_logging(
        begin.server.log_level, begin.server.log_format, show_content=begin.server.log_content
    )
    if begin.cpus:
        os.sched_setaffinity(0, begin.cpus)
    run: Callable[[messages.Begin, Channel], int] = _serve if begin.socket >= 0 else _look
    try:
        return run(begin, channel)
    except HeadraceError as error:
        channel.send(messages.Failed(error.cause, error.remedy, error.detail, error.exit_status))
        return error.exit_status


def _serve(begin: messages.Begin, channel: Channel) -> int:
    # In threads and not before: engines start sooner (server/start/run.py).
    from headrace.server.access.trusted import TrustedKeys
    from headrace.server.start.run import Behind, serve

    path = Path(begin.path)
    name = name_model(path, begin.typed)

    def on_service(service: Service) -> None:
        service.responses.tag = f"_r{begin.number}"
        service.responses.put_back(begin.stored)
        channel.follow(service)

    keys = TrustedKeys(begin.internal, begin.weights)
    return serve(
        path,
        name,
        named(begin.server, name, begin.keeps_names),
        replace(begin.engine, verify=False),
        typed=begin.typed,
        sock=socket.socket(fileno=begin.socket),
        start_up=ReportedStart(channel),
        checked=begin.checked,
        origins=begin.origins,
        behind=Behind(keys=keys, on_service=on_service),
    )


def named(server: ServerConfig, own: str, kept: tuple[str, ...]) -> ServerConfig:
    """Clients may go on using the names of the model before this one, unless names were set."""
    if server.served_model_name is not None or not kept:
        return server
    return replace(server, served_model_name=",".join([own, *kept]))


def _look(begin: messages.Begin, channel: Channel) -> int:
    """Everything of a start but loading."""
    from headrace.assemble import check_draft, find_draft, plan_memory
    from headrace.backends.registry import choose_backend
    from headrace.server.start.model import read_model
    from headrace.weights.load import open_weights

    log = logging.getLogger(__name__)
    engine = begin.engine
    said = ""

    def report(what: str, done_bytes: int, total_bytes: int | None) -> None:
        nonlocal said
        if what != said:
            said = what
            log.info("%s", what, extra={"event": "fetch"})

    path = resolve_model(begin.typed, offline=begin.offline, progress=report)
    checked = Checked()
    if engine.load_format is not LoadFormat.DUMMY:
        checked = check_model(path, again=engine.verify, progress=report)
    ledger = ""
    backend = choose_backend(engine)
    with contextlib.ExitStack() as opened:
        file = opened.enter_context(contextlib.closing(open_weights(path, engine.load_format)))
        draft = find_draft(engine, backend, offline=begin.offline)
        if draft is not None:
            opened.callback(draft.file.close)
            check_draft(path, file, draft, engine)
        if backend.name is not Device.CUDA:  # a GPU's memory is still taken by what runs on it
            # The replica that is to be replaced will have given its memory back.
            _, _, sizing = plan_memory(file, backend, engine, draft, engine.memory_share)
            ledger = sizing.ledger.render()
    name = name_model(path, begin.typed)
    read_model(path, name, server=begin.server, engine=engine, typed=begin.typed)
    channel.send(messages.Fits(str(path), name, ledger, checked))
    return 0


def _name_log_lines(number: int) -> None:
    """Every line of the log says which replica wrote it."""
    make = logging.getLogRecordFactory()

    def made(*args: Any, **more: Any) -> logging.LogRecord:
        record = make(*args, **more)
        record.replica = number
        return record

    if number:
        logging.setLogRecordFactory(made)


def _end_with_parent() -> None:
    """Also while it is stopped, when it would not see the socket's end."""
    parent = os.getppid()
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
