"""Sends a run's requests to an endpoint, and keeps what was said for turns that build on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from headrace.bench.prompts import Message, Writer
from headrace.bench.record import Record
from headrace.bench.target import Target
from headrace.client.answer import Failure
from headrace.client.connection import Connections, request_bytes
from headrace.workload.ask import Ask, answer_name


class EndpointSender:
    """`prompts` replace what a workload would draw, one after the other, from `first` on."""

    def __init__(
        self,
        connections: Connections,
        target: Target,
        writer: Writer,
        *,
        timeout_s: float,
        prompts: Sequence[list[Message]] = (),
        first: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._connections = connections
        self._target = target
        self._writer = writer
        self._timeout_s = timeout_s
        self._prompts = prompts
        self._first = first
        self._clock = clock
        self._answers: dict[str, str] = {}

    @property
    def is_idle(self) -> bool:
        return self._connections.is_idle

    def prepare(self, ask: Ask, number: int) -> bytes:
        if self._prompts:
            messages = self._prompts[(self._first + number) % len(self._prompts)]
        else:
            messages = self._writer.messages(ask, number, self._answers)
        body = self._target.body(messages, ask.output_tokens)
        return request_bytes(self._connections.address, self._target.path, body, self._target.key)

    async def send(self, record: Record, request: bytes, began_s: float) -> None:
        answer = record.answer
        try:
            one = await self._connections.take()
        except OSError as error:
            answer.fail(Failure.CONNECT, error.strerror or str(error))
            return
        record.sent_s = self._clock() - began_s
        await one.ask(request, answer, self._timeout_s)
        self._connections.give(one)
        if answer.ended_s is not None:
            record.end_s = answer.ended_s - began_s
        answer.times_s = [each - began_s for each in answer.times_s]
        if answer.visible_s is not None:
            answer.visible_s -= began_s
        ask = record.ask
        if ask.session is not None and answer.text:
            self._answers[answer_name(ask.session, ask.turn)] = "".join(answer.text)
