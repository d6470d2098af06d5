"""Profiles made of a known truth, for tests that must know what a machine would do."""

from __future__ import annotations

from headrace.core.step import RunnerLimits
from headrace.hardware.profile import (
    FirstToken,
    HostTime,
    Limits,
    Profile,
    Serving,
    StepTime,
    StreamTime,
)

FIXED_S, ROW_S, TOKEN_S, CONTEXT_S = 5e-3, 1e-3, 8e-4, 1e-6
HOST_S, SENT_S, TAKEN_S, WAY_IN_S, ROUND_TRIP_S = 4e-5, 1e-4, 2e-4, 2e-3, 6e-4
BUSY_S = 5e-4  # of WAY_IN_S


def true_s(rows: int, context: float, tokens: int, attended: float) -> float:
    """Straight in all of its sizes: what is between measured steps can be read off exactly. A mixed
    step has its fixed part once, so that it is no sum of two."""
    step_s = FIXED_S + ROW_S * rows + TOKEN_S * tokens
    return step_s + CONTEXT_S * (rows * context + tokens * attended)


def step(rows: int, context: int, tokens: int, start: int, *, draws: bool = True) -> StepTime:
    attended = start + (tokens + 1) / 2
    return StepTime(
        decode_rows=rows,
        context_tokens=context if rows else 0,
        prompt_tokens=tokens,
        prompt_start=start,
        draws=draws,
        seconds=true_s(rows, context, tokens, attended) - (0.0 if draws else 1e-3),
        spread=0.01,
        repetitions=5,
    )


ROWS, CHUNKS = (1, 4, 16, 64), (16, 64, 256)


def steps() -> tuple[StepTime, ...]:
    found = [step(n, 32, 0, 0) for n in ROWS]
    found += [step(0, 0, p, 0) for p in (1, *CHUNKS, 512)]
    found += [step(n, 32, p, 0) for n in ROWS for p in CHUNKS]
    found += [step(n, c, 0, 0) for n in ROWS for c in (256, 1024)]
    found += [step(0, 0, p, s) for p in (16, 256, 512) for s in (512, 2048)]
    return (*found, step(0, 0, 16, 0, draws=False))


def profile(*, serves: bool = True) -> Profile:
    """Served steps take HOST_S twice, SENT_S a row and TAKEN_S a row more than steps alone."""
    streams = []
    for rows in (1, 4, 16):
        alone_s = true_s(rows, 64, 0, 0)
        added_s = 2 * HOST_S + (SENT_S + TAKEN_S) * rows
        streams.append(
            StreamTime(
                streams=rows,
                schedule_s=HOST_S,
                compute_s=alone_s + TAKEN_S * rows,
                commit_s=HOST_S,
                publish_s=SENT_S * rows,
                token_s=alone_s + added_s,
                alone_s=alone_s,
                added_s=added_s,
                spread=0.0,
                repetitions=3,
            )
        )
    first = []
    for tokens in (17, 257, 1025):
        alone_s = true_s(1, tokens - 1, 0, 0)
        added_s = 2 * HOST_S + SENT_S + TAKEN_S + WAY_IN_S + 1e-6 * tokens + ROUND_TRIP_S / 2
        first.append(
            FirstToken(
                prompt_tokens=tokens,
                ttft_s=alone_s + added_s,
                alone_s=alone_s,
                added_s=added_s,
                busy_s=BUSY_S,
                spread=0.0,
                repetitions=4,
            )
        )
    return Profile(
        headrace="test",
        date="2026-11-16T00:00:00+00:00",
        machine={"device": "cpu", "cpu": "a test's", "threads": 2},
        model={"name": "tiny.gguf", "fingerprint": "0"},
        limits=Limits(
            max_batch_tokens=512,
            max_sequences=64,
            total_blocks=4096,
            block_tokens=16,
            context_tokens=8192,
            steps_in_flight=1,
            max_step_growth=2.0,
        ),
        steps=steps(),
        host=tuple(HostTime(decode_rows=n, schedule_s=HOST_S, commit_s=HOST_S) for n in (1, 64)),
        serving=Serving(
            streams=tuple(streams),
            first_tokens=tuple(first),
            round_trip_s=ROUND_TRIP_S,
        )
        if serves
        else None,
    )


RUNNER_LIMITS = RunnerLimits(
    max_batch_tokens=512,
    max_sequences=64,
    total_blocks=4096,
    block_tokens=16,
    context_tokens=8192,
)
