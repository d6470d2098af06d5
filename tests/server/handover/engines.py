"""Two engines over a tiny model on the real CPU kernels, in threads of this process: one gives
blocks, one takes them. And a way between the two that can be cut or changed at any byte."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from tests.engine.conftest import VOCAB, TinyModel

from headrace.backends.cpu.runner import CpuRunner
from headrace.core.config import SchedulerConfig
from headrace.core.request import GenerateRequest, SampledToken, SamplingParams
from headrace.engine.loop import Engine
from headrace.server.handover.giver import Giver
from headrace.server.handover.session import Peer, secret_of
from headrace.server.handover.taker import Taker

LIMIT_S = 60.0
SECRET = secret_of("key")
PRINT = "kv-tiny"

Answer = list[tuple[int, int, float, Any, Any]]


def make_engine(model: TinyModel, *, blocks: int = 64, **more: Any) -> Engine:
    config = SchedulerConfig(debug_invariants=True, prefix_cache=more.pop("prefix_cache", True))
    return Engine(CpuRunner(*model, total_blocks=blocks, **more), frozenset({3}), config)


class Giving:
    """An engine that gives, with a thread for its loop."""

    def __init__(self, model: TinyModel, **more: Any) -> None:
        secret, fingerprint = more.pop("secret", SECRET), more.pop("fingerprint", PRINT)
        self.engine = make_engine(model, **more)
        self.giver = Giver(
            self.engine,
            secret=secret,
            fingerprint=fingerprint,
            vocab_size=VOCAB,
            host="127.0.0.1",
            port=0,
        )
        self.peer = Peer("127.0.0.1", self.giver.port)
        self.steps = 0
        self.most_copied = 0  # pieces of one job at one time
        self.hold = threading.Event()  # clear: no steps
        self.hold.set()
        self._ends = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self.giver.waker, select.POLLIN)
        while not self._ends:
            if not self.engine.has_work:
                poll.poll(20)
            self.giver.turn()
            jobs = list(self.giver._jobs.values())
            self.most_copied = max([self.most_copied, *(len(job.pieces) for job in jobs)])
            if self.engine.has_work and self.hold.is_set():
                self.steps += 1
                self.giver.heard(self.engine.step())

    def close(self) -> None:
        self._ends = True
        self._thread.join()
        self.giver.close()


def make_taker(engine: Engine, **more: Any) -> Taker:
    settings = {"least_tokens": 16, "patience_s": LIMIT_S, "secret": SECRET, "fingerprint": PRINT}
    return Taker(engine, **{**settings, **more})


def finish(engine: Engine) -> list[SampledToken]:
    tokens: list[SampledToken] = []
    while engine.has_work:
        tokens += engine.step()
    return tokens


def answer_of(tokens: list[SampledToken]) -> Answer:
    return sorted(
        (
            (token.index, token.token_id, token.logprob, tuple(token.top), token.finish_reason)
            for token in tokens
        ),
        key=lambda each: each[0],  # stable: the order of each continuation is kept
    )


def fetch(engine: Engine, taker: Taker, request: GenerateRequest, peer: Peer) -> None:
    """Until the request is in the engine's queue, as a server's process would have it."""
    if not taker.fetch(request, peer):
        engine.add(request)
        return
    poll = select.poll()
    poll.register(taker.waker, select.POLLIN)
    until_s = time.monotonic() + LIMIT_S
    while time.monotonic() < until_s:
        poll.poll(20)
        ready = taker.turn()
        engine.check_integrity()
        if ready:
            (only,) = ready
            engine.add(replace(only, request_id=request.request_id))
            return
    raise AssertionError("the request was never ready")


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(7 * at * at + 13 * at + 31 * seed) % 190 + 5 for at in range(length)]


def request_of(tokens: list[int], name: str = "r", **params: Any) -> GenerateRequest:
    values: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, **params}
    salt = values.pop("salt", "")
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=tokens,
        params=SamplingParams(**values),
        cache_salt=salt,
    )


@contextmanager
def bad_way(peer: Peer, *, cut: int | None = None, flip: int | None = None) -> Iterator[Peer]:
    """A way to the peer that is cut after so many bytes of the giver, or changes one of them."""
    server = socket.create_server(("127.0.0.1", 0))

    def carry(source: socket.socket, target: socket.socket, *, is_giver: bool) -> None:
        passed = 0
        try:
            while data := source.recv(1 << 16):
                if is_giver and flip is not None and passed <= flip < passed + len(data):
                    at = flip - passed
                    data = data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]
                if is_giver and cut is not None and passed + len(data) >= cut:
                    target.sendall(data[: cut - passed])
                    break
                passed += len(data)
                target.sendall(data)
        except OSError:
            pass
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def run() -> None:
        while True:
            try:
                asker, _ = server.accept()
            except OSError:
                return
            giver = socket.create_connection((peer.host, peer.port))
            ways = [
                threading.Thread(target=carry, args=(asker, giver), kwargs={"is_giver": False}),
                threading.Thread(target=carry, args=(giver, asker), kwargs={"is_giver": True}),
            ]
            for way in ways:
                way.start()
            for way in ways:
                way.join()
            asker.close()
            giver.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield Peer("127.0.0.1", server.getsockname()[1])
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join()
