"""Requests drawn from distributions: lengths, arrivals, shared prefixes, sessions.

The same seed gives the same requests. Each session draws from a randomness of its own, so that the
same sessions come at any rate, and arrivals at twice the rate are the same ones in half the time:
two runs differ by what was changed and by nothing else. Knows no server and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count as counting
from itertools import islice
from random import Random
from typing import Protocol

from headrace.core.checks import refusal
from headrace.core.errors import ConfigError
from headrace.workload.arrivals import Arrivals, ClosedLoop, OpenLoop
from headrace.workload.ask import Ask, answer_name, question_name
from headrace.workload.distribution import Constant, Distribution, parse_distribution
from headrace.workload.slo import Slo

MAX_TOKENS = 100_000_000  # of one prompt or answer


class Workload(Protocol):
    """Implemented by `Synthetic` and, for recorded requests, by trace.py's `Trace`."""

    @property
    def name(self) -> str: ...

    @property
    def slo(self) -> Slo | None: ...

    def asks(self, seed: int = 0, count: int | None = None) -> Iterator[Ask]:
        """In order of `at_s`; a session's turns in order. Without `count`: all, or without end."""
        ...

    def at_rate(self, requests_s: float) -> Workload:
        """The same requests at another mean rate."""
        ...


@dataclass(frozen=True, slots=True)
class Lengths:
    """Whole numbers of tokens: what is drawn, rounded, and moved into the bounds."""

    of: Distribution
    least: int = 1
    most: int = MAX_TOKENS

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most <= MAX_TOKENS:
            raise refusal(
                ConfigError, "lengths", (self.least, self.most), f"bounds from 0 to {MAX_TOKENS}"
            )

    @property
    def mean(self) -> float:
        return self.of.mean_between(self.least, self.most)

    def draw(self, random: Random) -> int:
        drawn = self.of.draw(random)
        return min(max(round(min(drawn, self.most)), self.least), self.most)


def fixed(tokens: int) -> Lengths:
    return Lengths(Constant(tokens))


def parse_lengths(text: str, param: str, least: int = 1, most: int = MAX_TOKENS) -> Lengths:
    found = parse_distribution(text, param)
    if isinstance(found, Constant) and not least <= found.value <= most:
        raise refusal(ConfigError, param, text, f"{least} to {most} tokens")
    return Lengths(found, least, most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """A prompt is a shared prefix, then what earlier turns of its session had, then new tokens.

    Prompts never grow beyond `context_tokens` with their answer: a session ends before that, and a
    first prompt is cut.
    """

    name: str = "custom"
    prompts: Lengths  # new tokens of a first turn, without the prefix
    outputs: Lengths
    arrivals: Arrivals  # of sessions; a request without a session is one of a single turn
    prefixes: int = 0  # how many shared prefixes there are; each session has one of them
    prefix_tokens: int = 0
    turns: Lengths = field(default_factory=lambda: fixed(1))
    follow_ups: Lengths | None = None  # new tokens of later turns; None: as `prompts`
    # Seconds from an answer to the next turn: a person who thinks, or a tool that works.
    waits: Distribution = field(default_factory=lambda: Constant(0.0))
    context_tokens: int = MAX_TOKENS
    slo: Slo | None = None

    def __post_init__(self) -> None:
        if self.prefixes < 0 or self.prefix_tokens < 0:
            raise refusal(ConfigError, "prefixes", self.prefixes, "0 or more")
        if self.context_tokens < 2:
            raise refusal(ConfigError, "context_tokens", self.context_tokens, "2 or more")

    def asks(self, seed: int = 0, count: int | None = None) -> Iterator[Ask]:
        arrivals = self.arrivals
        if isinstance(arrivals, OpenLoop):
            drawn = self._open(arrivals, seed)
        else:
            drawn = self._closed(arrivals, seed)
        return islice(drawn, count)

    def at_rate(self, requests_s: float) -> Synthetic:
        if not isinstance(self.arrivals, OpenLoop):
            raise ConfigError(
                f"Workload {self.name} is a closed loop, which has no rate.",
                "Leave the rate out, or use arrivals such as poisson.",
                param="rate",
            )
        if not 0 < requests_s < math.inf:
            raise refusal(ConfigError, "rate", requests_s, "a number above 0")
        return replace(self, arrivals=self.arrivals.at_rate(requests_s / self.turns.mean))

    def with_clients(self, clients: int) -> Synthetic:
        """The same sessions as a closed loop."""
        return replace(self, arrivals=ClosedLoop(clients=clients))

    def _open(self, arrivals: OpenLoop, seed: int) -> Iterator[Ask]:
        times_s = arrivals.times_s(Random(f"{seed} arrivals"))
        for session, at_s in enumerate(times_s):
            yield from self._conversation(Random(f"{seed} session {session}"), session, at_s, 0)

    def _closed(self, arrivals: ClosedLoop, seed: int) -> Iterator[Ask]:
        """Each client is a session that never ends: conversation after conversation."""
        clients = [
            self._client(Random(f"{seed} session {client}"), client)
            for client in range(arrivals.clients)
        ]
        while True:
            for client in clients:
                yield next(client)

    def _client(self, random: Random, client: int) -> Iterator[Ask]:
        turn = 0
        while True:
            for ask in self._conversation(random, client, 0.0, turn):
                yield ask
                turn = ask.turn + 1

    def _conversation(self, random: Random, session: int, at_s: float, first: int) -> Iterator[Ask]:
        """From turn number `first` of the session on."""
        before: list[tuple[str, int]] = []
        if self.prefixes and self.prefix_tokens:
            kind = random.randrange(self.prefixes)
            before.append((f"prefix {kind}", min(self.prefix_tokens, self.context_tokens - 2)))
        turns = max(1, self.turns.draw(random))
        for turn in counting(first):
            is_first = turn == first
            lengths = self.prompts if is_first else (self.follow_ups or self.prompts)
            new, output = lengths.draw(random), self.outputs.draw(random)
            wait_s = 0.0 if is_first else max(0.0, self.waits.draw(random))
            held = sum(tokens for _, tokens in before)
            room = self.context_tokens - held
            if is_first:
                output = min(output, max(1, room - 1))
                new = min(new, room - output)
            if turn - first >= turns or new + output > room:
                return
            yield Ask(
                at_s=at_s,
                prompt_tokens=max(1, held + new),
                output_tokens=output,
                shared=tuple(before),
                session=session,
                turn=turn,
                after_s=wait_s if turn else None,
            )
            before.append((question_name(session, turn), new))
            before.append((answer_name(session, turn), output))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Means over requests."""

    requests: int
    prompt_tokens: float
    output_tokens: float
    shared_share: float  # of all prompt tokens, those that an earlier prompt began with
    rate_s: float | None  # None: fewer than two scheduled times


def summarize(asks: Iterable[Ask]) -> Summary:
    """A prefix counts as shared from its second prompt on; answers of earlier turns always do."""
    listed = list(asks)
    if not listed:
        raise ConfigError("The workload has no requests; expected at least one.")
    chains: dict[tuple[int, str, int], int] = {}  # (all before it, name, tokens) -> its number
    shared = 0
    for ask in listed:
        at, is_known = 0, True
        for name, tokens in ask.shared:
            key = (at, name, tokens)
            is_known = is_known and key in chains
            shared += tokens if is_known else 0
            at = chains.setdefault(key, len(chains) + 1)
        if ask.session is not None:
            own = ask.prompt_tokens - ask.shared_tokens
            for name, tokens in (
                (question_name(ask.session, ask.turn), own),
                (answer_name(ask.session, ask.turn), ask.output_tokens),
            ):
                at = chains.setdefault((at, name, tokens), len(chains) + 1)
    prompts = sum(ask.prompt_tokens for ask in listed)
    span_s = listed[-1].at_s - listed[0].at_s
    return Summary(
        requests=len(listed),
        prompt_tokens=prompts / len(listed),
        output_tokens=sum(ask.output_tokens for ask in listed) / len(listed),
        shared_share=shared / prompts,
        rate_s=(len(listed) - 1) / span_s if span_s > 0 else None,
    )
