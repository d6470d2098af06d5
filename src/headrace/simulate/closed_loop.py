"""First token and time per token of a closed loop, by arithmetic: so many clients, each of which
sends its next request when its last one ended, with prompts and answers of one length.

This is how public benchmarks of servers are taken, so that their rows can be compared with
roofline.py without simulating each. In the steady state every client's answer is interrupted once
by the prompt of every other client. A first token waits for the step that is under way, for its
own prompt and for others that arrived with it; at the start, all prompts arrive at once, and that
wave is a part of the mean. What does not fit in the KV memory waits for a whole request.
Knows no arrival process: for those there is the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.simulate.roofline import StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """How an engine and a benchmark's clients let first tokens wait."""

    prompts: float = 1.0  # prompts computed until a first token, its own included
    steps: float = 1.0  # decoding steps
    first_wave: float = 0.1  # share of the mean that the first wave is: 1 in 10 requests a client
    request_s: float = 0.0  # a request, outside of steps
    interrupted: float = 1.0  # share of the others' prompts that interrupts an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """The clients' load, with everything that needs a comparison already decided."""

    input_tokens: float
    output_tokens: float
    running: float  # sequences that run at a time, of all copies
    queued: float  # requests that wait for each one that runs: clients / running - 1
    chunk_tokens: float  # of a prompt in one step
    chunks: float  # steps that a prompt takes
    copies: float
    decoding: Sequence[float]  # context tokens of all running sequences, by span
    pairs: Sequence[float]  # of one chunk of every copy, by span


def loop_of(
    times: StepTimes,
    *,
    input_tokens: int,
    output_tokens: int,
    clients: int,
    room_tokens: float,
    step_tokens: int,
) -> Loop:
    """`room_tokens`: context tokens that KV memory holds, of all copies together; a sequence takes
    its prompt and half of its answer of it on average."""
    middle = input_tokens + output_tokens / 2
    running = min(float(clients), max(float(times.copies), room_tokens / middle))
    chunk = min(input_tokens, step_tokens)
    chunks = input_tokens / chunk
    mean_keys = input_tokens / 2
    return Loop(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        running=running,
        queued=clients / running - 1,
        chunk_tokens=chunk,
        chunks=chunks,
        copies=times.copies,
        decoding=[running * min(middle, limit) for limit in times.span_limits],
        pairs=[chunk * min(mean_keys, limit) * times.copies for limit in times.span_limits],
    )


def closed_loop_s(times: StepTimes, loop: Loop, waits: Waits) -> tuple[float, float]:
    """Seconds to the first token (mean) and per token after it."""
    none = [0.0 for _ in loop.decoding]
    running, copies = loop.running, loop.copies
    step = times.step_s(running, running, decoding=loop.decoding, reading=none, pairs=none)
    mixed = times.step_s(
        running + loop.chunk_tokens * copies,
        running,
        decoding=loop.decoding,
        reading=none,
        pairs=loop.pairs,
    )
    prompt = (mixed - step) * loop.chunks  # of each copy at the same time
    others = running / copies - 1
    tpot = step + waits.interrupted * others * prompt / (loop.output_tokens - 1)
    first = (
        waits.request_s
        + waits.prompts * prompt
        + waits.steps * step
        + waits.first_wave * others / 2 * prompt
    )
    return first + loop.queued * (first + loop.output_tokens * tpot), tpot
