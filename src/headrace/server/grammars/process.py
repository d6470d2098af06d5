"""The grammar processes: one that waits and forks, and a forked one for each grammar.

    python -m headrace.server.grammars.process FD

Grammars come from clients and are not trusted, and the library that compiles and follows them can
be neither interrupted nor limited in memory. So each has a process of its own, with CPU time and
memory limits set by the system, which can be killed without harm to other requests. The first
process reads the tokenizer once; its forks share that memory and take a millisecond or two.

The engine's end is host.py. Knows grammars and tokenizers; no engine and no HTTP.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec

from headrace.core.constraint import Foreseen
from headrace.core.errors import HeadraceError, InvalidRequestError
from headrace.grammar import STACK_BYTES, GrammarCompiler, Matched, on_deep_stack
from headrace.server.grammars import messages
from headrace.server.link.frames import Decoder, Encoder

COMPILE_CPU_S = 3  # CPU time for compiling
# Memory for compiling and following a grammar: a schema of 300 objects takes 20 MiB.
MEMORY_BYTES = 128 << 20
# CPU time for following a grammar, for all continuations of a request together: a fixed part and a
# part per token. Most grammars take 0.05 ms per token, slow ones 0.2 ms.
FIRST_S, TOKEN_S = 1.0, 0.002
ANSWER_CPU_S = 5  # limit for a single mask; one that takes longer never ends
READ_BYTES = 1 << 16
# Sent to the first process: a command, and the number of the process that it is about.
ORDER_BYTES = 9
START, KILL = b"s", b"k"
REAP_MS = 1000.0

M = TypeVar("M")


class Setup(msgspec.Struct, frozen=True):
    """The first message to the first process."""

    model_path: str
    load_format: str
    vocab_size: int


# -- the process that forks ------------------------------------------------------------------------


def serve_starts(control: socket.socket, compiler: GrammarCompiler) -> None:
    """Fork a process for each socket that arrives, until the engine closes its end."""
    started: dict[int, int] = {}  # number -> process
    try:
        poll = select.poll()
        poll.register(control, select.POLLIN)
        while True:
            if not poll.poll(REAP_MS):
                _reap(started)
                continue
            data, descriptors, _, _ = socket.recv_fds(control, ORDER_BYTES, 1)
            while data and len(data) < ORDER_BYTES:
                data += control.recv(ORDER_BYTES - len(data)) or b"?"
            _reap(started)
            if not data:
                return
            number = int.from_bytes(data[1:], "little")
            if data[:1] == KILL:
                if number in started:
                    os.kill(started[number], signal.SIGKILL)
                continue
            process = os.fork()
            if process == 0:
                control.close()
                _be_grammar(socket.socket(fileno=descriptors[0]), compiler)
            started[number] = process
            os.close(descriptors[0])
    finally:
        _reap(started)
        for process in started.values():
            os.kill(process, signal.SIGKILL)


def _reap(started: dict[int, int]) -> None:
    """Reap those that have ended: only then may the system reuse their process ids."""
    for number, process in list(started.items()):
        if os.waitpid(process, os.WNOHANG)[0]:
            del started[number]


# -- a grammar's process ---------------------------------------------------------------------------


def _be_grammar(sock: socket.socket, compiler: GrammarCompiler) -> NoReturn:
    status = 1
    try:
        _leave_traces_to_nobody()
        memory = Memory()
        with contextlib.suppress(
            BrokenPipeError, ConnectionResetError
        ):  # the engine has closed its end
            on_deep_stack(lambda: GrammarServer(sock, compiler, memory).run())
        status = 0
    finally:
        os._exit(status)  # without the first process's exit handlers


def _leave_traces_to_nobody() -> None:
    """Without this, a compiler that crashes would write to the server's log, or dump core."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # If the machine runs out of memory, the system should kill this process first.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


class Memory:
    """The memory that this process has taken since the fork, capped at its limit."""

    def __init__(self) -> None:
        self._first = _data_bytes() + STACK_BYTES
        if self._first > STACK_BYTES:
            most = self._first + MEMORY_BYTES
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))

    @property
    def grown_bytes(self) -> int:
        return max(0, _data_bytes() - self._first)


def _data_bytes() -> int:
    """This process's private writable memory; 0: not known on this system."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(b"VmData:"):
                return int(line.split()[1]) << 10
    return 0


def _allow_cpu(seconds: float) -> None:
    """From now on the system kills this process if it uses more CPU time."""
    used = time.process_time()
    resource.setrlimit(
        resource.RLIMIT_CPU, (math.ceil(used + seconds), resource.getrlimit(resource.RLIMIT_CPU)[1])
    )


@dataclass(slots=True)
class Account:
    """The CPU time that all continuations of a request took together."""

    walks: int = 0
    tokens: int = 0
    seconds: float = 0.0
    looked_s: float = 0.0  # besides, for looking ahead: which ends no request

    @property
    def most_s(self) -> float:
        return FIRST_S + TOKEN_S * self.tokens

    def check(self) -> None:
        if self.seconds > self.most_s:
            raise InvalidRequestError(
                f"The grammar can't be followed any further: it took {self.seconds:.1f} s over "
                f"{self.tokens} tokens; expected at most {FIRST_S:g} s and {TOKEN_S * 1000:g} ms "
                "a token",
                "Simplify the grammar.",
            )


@dataclass(slots=True)
class Walk:
    at: Matched
    account: Account


class GrammarServer:
    """One grammar: compiled, then followed by any number of walks."""

    def __init__(self, sock: socket.socket, compiler: GrammarCompiler, memory: Memory) -> None:
        self._socket = sock
        self._compiler = compiler
        self._memory = memory
        self._encoder = Encoder()
        self._walks: dict[int, Walk] = {}
        self._accounts: dict[int, Account] = {}

    def run(self) -> None:
        begin = messages.begin_decoder()
        for message in self._messages(begin):
            if not self._compile(message):
                return
            break
        for orders in self._messages(messages.orders_decoder()):
            self._obey(orders)

    def _messages(self, decoder: Decoder[M]) -> Iterator[M]:
        while data := self._socket.recv(READ_BYTES):
            yield from decoder.feed(data)

    def _compile(self, begin: messages.Begin) -> bool:
        began = time.perf_counter()
        _allow_cpu(COMPILE_CPU_S)
        try:
            self._start = self._compiler.start(begin.spec)
            mask = self._start.mask()
        except HeadraceError as error:
            self._send(messages.Failed(error.cause, error.remedy))
            return False
        seconds = time.perf_counter() - began
        self._send(messages.Compiled(mask, self._memory.grown_bytes, seconds, os.getpid()))
        return True

    def _obey(self, orders: list[messages.Order]) -> None:
        answers: list[messages.Answer] = []
        looks: list[messages.Foresee] = []
        began = time.thread_time()
        for order in orders:
            if isinstance(order, messages.Accept):
                answers.append(self._answer(order))
            elif isinstance(order, messages.Foresee):
                looks.append(order)
            elif isinstance(order, messages.Open):
                self._add(order.walk, self._start.fork(), order.request)
            elif isinstance(order, messages.Fork):
                source = self._walks[order.source]
                self._walks[order.walk] = Walk(source.at.fork(), source.account)
                source.account.walks += 1
            else:
                self._close(order.walk)
        if answers:
            seconds = time.thread_time() - began
            self._send(messages.Answers(answers, self._memory.grown_bytes, seconds))
        if looks:  # later: the engine waits for the answers first
            began = time.thread_time()
            sights = [self._look(order) for order in looks if order.walk in self._walks]
            seconds = time.thread_time() - began
            self._send(messages.Sights(sights, self._memory.grown_bytes, seconds))

    def _look(self, order: messages.Foresee) -> messages.Sight:
        """Says nothing, rather than fail, if that takes too long or can't be said."""
        walk = self._walks[order.walk]
        account, found = walk.account, Foreseen()
        _allow_cpu(ANSWER_CPU_S)
        began = time.thread_time()
        if account.looked_s < account.most_s:
            with contextlib.suppress(HeadraceError):
                found = walk.at.look_ahead(order.token_ids, order.forced)
        account.looked_s += time.thread_time() - began
        return messages.Sight(order.walk, order.number, list(found.token_ids), list(found.masks))

    def _add(self, walk: int, at: Matched, request: int) -> None:
        account = self._accounts.setdefault(request, Account())
        account.walks += 1
        self._walks[walk] = Walk(at, account)

    def _close(self, number: int) -> None:
        walk = self._walks.pop(number)
        walk.account.walks -= 1
        if not walk.account.walks:
            self._accounts = {key: a for key, a in self._accounts.items() if a.walks}

    def _answer(self, order: messages.Accept) -> messages.Answer:
        walk = self._walks[order.walk]
        account = walk.account
        _allow_cpu(ANSWER_CPU_S)
        began = time.thread_time()
        try:
            account.check()
            walk.at.accept(*order.token_ids)
            account.tokens += len(order.token_ids)
            mask = b"" if walk.at.is_stopped else walk.at.mask()
        except HeadraceError as error:
            is_own_fault = isinstance(error, InvalidRequestError)
            return messages.Answer(order.walk, b"", error.cause, is_own_fault)
        finally:
            account.seconds += time.thread_time() - began
        return messages.Answer(order.walk, mask)

    def _send(self, message: messages.FromGrammar) -> None:
        self._socket.sendall(self._encoder.frame(message))


def make_compiler(setup: Setup) -> GrammarCompiler:
    from headrace.assemble import read_tokenizer
    from headrace.core.config import LoadFormat
    from headrace.weights.load import open_weights

    file = open_weights(Path(setup.model_path), LoadFormat(setup.load_format))
    try:
        tokenizer = read_tokenizer(file)
    finally:
        file.close()
    compiler = GrammarCompiler(tokenizer, setup.vocab_size)
    compiler.prepare()
    return compiler


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the HTTP process decides when to stop
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    compiler = make_compiler(msgspec.json.decode(sys.argv[2], type=Setup))
    gc.collect()
    gc.freeze()  # so that forks share what was read rather than copy it, page by page
    serve_starts(control, compiler)
    return 0


if __name__ == "__main__":
    sys.exit(main())
