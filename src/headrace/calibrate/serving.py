"""What the way through the server adds to steps, measured where it matters: a running server with
clients that stream, in turn with the same steps without a server.

Three things are measured. With n streams at once, the time between a client's tokens, beside a step
of n rows alone: the difference is the engine's loop, the messages to the HTTP process, and the
processor time that this process and the clients take from a step. With one request at a time, the
time to the first token of a prompt that the prefix cache has but for its last token, beside a step
of one token alone: the way in and out, without the noise of a long step. With a few and with many
such requests at once, the time until all have their first token: what one more of them adds. Knows
the client and steps.
"""

from __future__ import annotations

import asyncio
import http.client
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from headrace.calibrate.client import Connection, Heard, Server, completion
from headrace.calibrate.statistic import median, spread
from headrace.hardware.profile import FirstToken, Serving, StreamTime

STREAMS = (1, 4, 16, 48, 192)  # as many of them as sequences may run
PROMPT, OUTPUT = 32, 64
FIRST_BLOCKS = (1, 16, 64)  # of prompts that the prefix cache has
AGAIN = 4  # times a prompt is asked
BURSTS = (12, 48)  # requests at once
BEAT_S = 0.6  # the server's counters are renewed twice a second
PARTS = ("schedule", "compute", "sample", "commit", "publish")
AloneStep = Callable[[int, int], float]  # decoding rows, their context


@dataclass(slots=True)
class _Streams:
    token_s: list[float] = field(default_factory=list)
    alone_s: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    steps: float = 0.0


@dataclass(slots=True)
class _Found:
    streams: defaultdict[int, _Streams] = field(default_factory=lambda: defaultdict(_Streams))
    ttft_s: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    alone_s: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    busy_s: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    round_trips_s: list[float] = field(default_factory=list)
    bursts_s: list[float] = field(default_factory=list)  # what one more request added


def measure_serving(
    server: Server,
    alone: AloneStep,
    *,
    vocabulary: Sequence[int],
    max_sequences: int,
    max_prompt: int,
    block_tokens: int,
    is_over: Callable[[int], bool],
    tell: Callable[[int], None] = lambda done: None,
) -> Serving | None:
    """Rounds until `is_over(rounds)`; None if a Ctrl-C came before the first was done."""
    found, random = _Found(), Random(1)
    counts = [n for n in STREAMS if n <= max_sequences]
    lengths = [n * block_tokens + 1 for n in FIRST_BLOCKS if n * block_tokens < max_prompt]
    rounds = 0
    try:
        _ask(server.port, [_prompt(random, vocabulary, PROMPT)] * 2, OUTPUT)  # warms up
        while not is_over(rounds):
            for count in counts:
                _streams(server, found, count, alone, random, vocabulary)
            for tokens in lengths:
                prompt = _prompt(random, vocabulary, tokens)
                _ask(server.port, [prompt], 1)
                busy_s = server.http_busy_s()
                for _ in range(AGAIN):
                    found.alone_s[tokens].append(median(_settled(alone, 1, tokens - 1)))
                    (heard,) = _ask(server.port, [prompt], 1)
                    found.ttft_s[tokens].append(heard.ttft_s)
                found.busy_s[tokens].append((server.http_busy_s() - busy_s) / AGAIN)
            if BURSTS[-1] <= max_sequences:
                found.bursts_s.append(_burst(server, alone, random, vocabulary, block_tokens))
            found.round_trips_s += [_round_trip(server.port) for _ in range(5)]
            rounds += 1
            tell(rounds)
    except KeyboardInterrupt:
        if not rounds:
            return None
    return _summed(found)


def _streams(
    server: Server,
    found: _Found,
    count: int,
    alone: AloneStep,
    random: Random,
    vocabulary: Sequence[int],
) -> None:
    """One run with so many streams, and the same step without a server before and after it."""
    kept = found.streams[count]
    context = PROMPT + OUTPUT // 2
    alone_s = _settled(alone, count, context)
    time.sleep(BEAT_S)
    before = server.counters()
    prompts = [_prompt(random, vocabulary, PROMPT) for _ in range(count)]
    heard = _ask(server.port, prompts, OUTPUT)
    time.sleep(BEAT_S)
    after = server.counters()
    alone_s += _settled(alone, count, context)
    kept.steps += after["steps"] - before["steps"]
    for part in PARTS:
        name = f"step_seconds {part}"
        kept.parts[part] += after[name] - before[name]
    kept.token_s.append(token_s(heard))
    kept.alone_s.append(median(alone_s))


def _burst(
    server: Server,
    alone: AloneStep,
    random: Random,
    vocabulary: Sequence[int],
    block_tokens: int,
) -> float:
    """The prefix cache has the prompt but for its last token: with the larger number of requests
    the engine has one step of more rows, and the rest of the difference is the way in."""
    prompt = _prompt(random, vocabulary, block_tokens + 1)
    _ask(server.port, [prompt], 1)
    until_all_s = []
    for count in BURSTS:
        heard = _ask(server.port, [prompt] * count, 1)
        whole_s = max(one.first_s for one in heard) - min(one.sent_s for one in heard)
        until_all_s.append(whole_s - median(_settled(alone, count, block_tokens)))
    few_s, many_s = until_all_s
    return (many_s - few_s) / (BURSTS[1] - BURSTS[0])


def _settled(alone: AloneStep, rows: int, context: int) -> list[float]:
    """Steps one after the other, as a server computes them; without the first, which are cold."""
    return [alone(rows, context) for _ in range(8)][2:]


def token_s(heard: Sequence[Heard]) -> float:
    """The mean time between texts while all streams decode: from the last one's first text to the
    first one's last, so that nobody's prompt is in it. A mean, since throughput is made of means;
    the median over streams, since their texts come together."""
    from_s, until_s = max(one.first_s for one in heard), min(one.last_s for one in heard)
    means = []
    for one in heard:
        times = [at for at in one.text_s if from_s <= at <= until_s]
        if len(times) > 1:
            means.append((times[-1] - times[0]) / (len(times) - 1))
    return median(means) if means else median([one.tpot_s for one in heard])


def _summed(found: _Found) -> Serving:
    streams = []
    for count, one in sorted(found.streams.items()):
        if not one.token_s or not one.steps:
            continue
        each = {part: seconds / one.steps for part, seconds in one.parts.items()}
        streams.append(
            StreamTime(
                streams=count,
                schedule_s=each["schedule"],
                compute_s=each["compute"] + each["sample"],
                commit_s=each["commit"],
                publish_s=each["publish"],
                token_s=median(one.token_s),
                alone_s=median(one.alone_s),
                added_s=max(0.0, _difference(one.token_s, one.alone_s)),
                spread=spread(one.token_s),
                repetitions=len(one.token_s),
            )
        )
    first = [
        FirstToken(
            prompt_tokens=tokens,
            ttft_s=median(values),
            alone_s=median(found.alone_s[tokens]),
            added_s=max(0.0, _difference(values, found.alone_s[tokens])),
            busy_s=max(0.0, median(found.busy_s[tokens])) if found.busy_s[tokens] else 0.0,
            spread=spread(values),
            repetitions=len(values),
        )
        for tokens, values in sorted(found.ttft_s.items())
        if found.alone_s[tokens]
    ]
    return Serving(
        streams=tuple(streams),
        first_tokens=tuple(first),
        round_trip_s=median(found.round_trips_s) if found.round_trips_s else 0.0,
        burst_s=max(0.0, median(found.bursts_s)) if found.bursts_s else 0.0,
    )


def _difference(values: Sequence[float], others: Sequence[float]) -> float:
    """The median of pairs: a machine that is slow for a while is slow for both of a pair."""
    return median([one - other for one, other in zip(values, others, strict=False)])


def _prompt(random: Random, vocabulary: Sequence[int], tokens: int) -> list[int]:
    return random.choices(vocabulary, k=tokens)


def _ask(port: int, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[Heard]:
    """All at once, each over a connection of its own that is open before the clock starts."""

    async def run() -> list[Heard]:
        requests = [completion(prompt, output_tokens) for prompt in prompts]
        connections = [await Connection.open(port) for _ in prompts]
        pairs = zip(connections, requests, strict=True)
        try:
            return await asyncio.gather(*(one.ask(request) for one, request in pairs))
        finally:
            for connection in connections:
                connection.close()

    return asyncio.run(run())


def _round_trip(port: int) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.connect()
        began_s = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        return time.perf_counter() - began_s
    finally:
        connection.close()
