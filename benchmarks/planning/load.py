"""Sends a workload's requests to a running server, and keeps what a client sees of each.

The same asks as the simulator's, over plain sockets in one process: an open loop sends at the
scheduled times, whatever the server does; a session's turn follows its answer. A request counts
from the time at which it was to be sent. What comes back has the simulator's own form, so that both
are summed up by the same code.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import defaultdict
from collections.abc import Sequence

from headrace.calibrate.client import Connection, Heard, completion
from headrace.core.errors import HeadraceError
from headrace.simulate.served import Served
from headrace.workload.ask import Ask, answer_name, question_name
from headrace.workload.tokens import prompt_ids

READY_CONNECTIONS = 64  # opened before the clock starts


class Load:
    """One run. `salt` makes its prompts others than those of any run before it."""

    def __init__(self, port: int, vocabulary: Sequence[int], salt: str) -> None:
        self._port = port
        self._vocabulary = vocabulary
        self._salt = salt
        self._idle: list[Connection] = []
        self._answers: dict[str, Sequence[int]] = {}
        self._wanted: set[str] = set()  # names of answers that a later prompt begins with
        self.late_s: list[float] = []  # how much later than scheduled requests were sent

    async def run(self, asks: Sequence[Ask]) -> list[Served]:
        """In order of their times."""
        chains: defaultdict[int, list[Ask]] = defaultdict(list)
        alone: list[list[Ask]] = []
        for ask in asks:
            if ask.session is None:
                alone.append([ask])
            else:
                chains[ask.session].append(ask)
        self._wanted = {name for ask in asks for name, _ in ask.shared if _is_answer(name)}
        ready = min(READY_CONNECTIONS, len(chains) + len(alone))
        self._idle = [await Connection.open(self._port) for _ in range(ready)]
        bodies = {
            id(ask): self._body(ask)
            for ask in asks
            if not any(_is_answer(n) for n, _ in ask.shared)
        }
        gc.collect()
        gc.disable()
        try:
            began_s = time.perf_counter()
            found = await asyncio.gather(
                *(self._chain(one, bodies, began_s) for one in [*chains.values(), *alone])
            )
        finally:
            gc.enable()
            for connection in self._idle:
                connection.close()
        return sorted((each for some in found for each in some), key=lambda one: one.arrival_s)

    async def _chain(
        self, asks: Sequence[Ask], bodies: dict[int, bytes], began_s: float
    ) -> list[Served]:
        served: list[Served] = []
        for ask in asks:
            at_s = ask.at_s
            if ask.after_s is not None and served:
                at_s = max(at_s, (served[-1].end_s or 0.0) + ask.after_s)
            await _until(began_s + at_s)
            served.append(await self._one(ask, at_s, bodies.get(id(ask)), began_s))
        return served

    async def _one(self, ask: Ask, at_s: float, body: bytes | None, began_s: float) -> Served:
        connection = await self._connection()
        one = Served(ask=ask, arrival_s=at_s)
        try:
            heard = await connection.ask(body or self._body(ask), wants_ids=self._wants(ask))
        except HeadraceError as error:
            connection.close()
            one.refused, one.end_s = error.cause[:80], time.perf_counter() - began_s
            return one
        self._idle.append(connection)
        self.late_s.append(heard.sent_s - began_s - at_s)
        one.first_s, one.end_s = heard.first_s - began_s, heard.last_s - began_s
        one.started_s, one.tokens = one.first_s, heard.tokens
        self._keep(ask, heard)
        return one

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return await Connection.open(self._port)

    def _keep(self, ask: Ask, heard: Heard) -> None:
        if ask.session is not None and heard.token_ids:
            self._answers[answer_name(ask.session, ask.turn)] = heard.token_ids

    def _wants(self, ask: Ask) -> bool:
        return ask.session is not None and answer_name(ask.session, ask.turn) in self._wanted

    def _body(self, ask: Ask) -> bytes:
        """Names get the run's salt, so that nothing of another run is in the prefix cache."""
        salted = Ask(
            at_s=ask.at_s,
            prompt_tokens=ask.prompt_tokens,
            output_tokens=ask.output_tokens,
            shared=tuple(
                (name if name in self._answers else f"{self._salt} {name}", tokens)
                for name, tokens in ask.shared
            ),
        )
        if ask.session is None:
            own = f"{self._salt} {id(ask)}"
        else:
            own = f"{self._salt} {question_name(ask.session, ask.turn)}"
        ids = prompt_ids(salted, own, self._vocabulary, self._answers)
        return completion(ids, ask.output_tokens, wants_ids=self._wants(ask))


def _is_answer(name: str) -> bool:
    return name.endswith(" answer")


async def _until(at_s: float) -> None:
    """Timers may be late by a millisecond: the last part is waited for in small steps."""
    while (left_s := at_s - time.perf_counter()) > 0:
        await asyncio.sleep(left_s - 0.0005 if left_s > 0.001 else 0)
