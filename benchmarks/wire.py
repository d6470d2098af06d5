"""What a step's tokens cost between the engine process and the HTTP process: bytes and time.

    python benchmarks/wire.py

For steps of 1, 64 and 256 tokens of as many requests: how many bytes a token takes, how long the
engine process needs from its tokens to a frame, and the HTTP process from the frame to tokens by
request. Plain tokens, as most are; then with 5 alternatives each. No sockets, no model; the best of
many rounds, so that a busy machine changes little.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from headrace.core.request import FinishReason, SampledToken
from headrace.server.link import wire
from headrace.server.link.frames import Encoder

SIZES = 1, 64, 256
ALTERNATIVES = 0, 5
ROUNDS, ROUND_S = 400, 0.002
VOCABULARY = 128_256


def make_step(size: int, alternatives: int) -> list[SampledToken]:
    source = random.Random(size)

    def scored() -> tuple[int, float]:
        return source.randrange(VOCABULARY), -source.random() * 20

    return [
        SampledToken(
            request_id=f"chatcmpl-{uuid.UUID(int=source.getrandbits(128)).hex}",
            token_id=source.randrange(VOCABULARY),
            logprob=-source.random(),
            top=[scored() for _ in range(alternatives)],
            finish_reason=FinishReason.STOP if source.random() < 0.005 else None,
        )
        for _ in range(size)
    ]


def sender(tokens: Sequence[SampledToken]) -> Callable[[], bytes]:
    encoder = Encoder()
    numbers = {token.request_id: 10_000 + place for place, token in enumerate(tokens)}
    return lambda: encoder.frame(wire.Tokens.of(tokens, [], numbers))


def receiver(frame: bytes, tokens: Sequence[SampledToken]) -> Callable[[], Any]:
    decoder = wire.from_engine_decoder()

    def receive() -> dict[int, list[Any]]:
        streams: dict[int, list[Any]] = {10_000 + place: [] for place in range(len(tokens))}
        (message,) = decoder.feed(frame)
        assert isinstance(message, wire.Tokens)
        for number, token in message.rows():
            streams[number].append(token)
        return streams

    return receive


def best_us(work: Callable[[], Any]) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        count, began, spent_s = 0, time.perf_counter(), 0.0
        while spent_s < ROUND_S:
            work()
            count += 1
            spent_s = time.perf_counter() - began
        best = min(best, spent_s / count)
    return best * 1e6


def main() -> None:
    print("| tokens in a step | alternatives | bytes a token | to a frame, µs | from it, µs |")
    print("|---|---|---|---|---|")
    for alternatives in ALTERNATIVES:
        for size in SIZES:
            tokens = make_step(size, alternatives)
            send = sender(tokens)
            frame = send()
            told, heard = best_us(send), best_us(receiver(frame, tokens))
            print(
                f"| {size} | {alternatives} | {len(frame) / size:.1f} | {told:.1f} | {heard:.1f} |"
            )


if __name__ == "__main__":
    main()
