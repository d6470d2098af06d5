"""Predicted gains of letting more run together, from the step's time (step_curve.py).

A burst is played step by step, before and after the change; a server's own traffic is the work of
its mean request. Each reading of the step's time gives a gain, and their range is the band. Knows
times and counts; no engine, no flags.
"""

from __future__ import annotations

import math
import statistics

from headrace.doctor.finding import Gain, no_gain
from headrace.doctor.observation import Observation, computed_of, ttft_of
from headrace.doctor.step_curve import (
    Steps,
    alone_s,
    burst_rate,
    computed_prompt,
    prompt_share,
    steps_of_burst,
    steps_of_traffic,
)

_PIECE_TOKENS = 512  # of prompts in one step, where the engine does not tell
_PROMPT_TOKENS = 64.0  # where nothing tells how long prompts are
_NEEDS_PROBE = "needs a probe or a profile, for the time of a step at several batch sizes"
_NEEDS_QUIET = (
    "the probes ran beside others' requests, and this engine does not tell what prompts take: give "
    "a profile, or probe when nothing runs"
)


def burst_s(
    steps: Steps,
    *,
    asked: int,
    places: int,
    prompt_tokens: float,
    answer_tokens: int,
    piece_tokens: float = _PIECE_TOKENS,
    growth: float | None = None,
) -> float:
    """How long `asked` requests that come at once take with so many places, step by step: prompts
    go in pieces beside the tokens of those that are already being answered. The first that comes
    starts a step of its own; the others are there when it ends. `growth`: how many times as long a
    step with prompts may take as one without, for each prompt that waits beside an answer."""
    waiting, clock = asked, 0.0
    prompts: list[float] = []  # tokens that are not computed yet, of those that have a place
    answers: list[int] = []  # tokens that are still to come
    while waiting or prompts or answers:
        enter = min(waiting, places - len(prompts) - len(answers)) if clock else 1
        waiting -= enter
        prompts += [max(prompt_tokens, 1.0)] * enter
        decoding, piece = len(answers), min(sum(prompts), piece_tokens)
        if growth is not None and decoding and prompts:
            crowd = max(1.0, len(prompts) / decoding)
            cost = steps.prompt(_PROMPT_TOKENS) / _PROMPT_TOKENS
            room = crowd * (growth - 1) * steps.decode(decoding) / cost if cost > 0 else piece
            piece = min(piece, max(1.0, room))
        clock += steps.decode(max(decoding, 1)) + steps.prompt(piece - (0 if decoding else 1))
        answers = [left - 1 for left in answers if left > 1]
        while prompts and piece >= prompts[0] - 1e-9:
            piece -= prompts.pop(0)
            if answer_tokens > 1:
                answers.append(answer_tokens - 1)
        if prompts:
            prompts[0] -= piece
    return clock


def gain_in_burst(seen: Observation, then: float, now: float | None = None) -> Gain:
    """Of the bursts: from `now` places to `then`. This is what `verify` looks at."""
    probe, readings = seen.probe, steps_of_burst(seen)
    rates = [r for b in probe.bursts if (r := burst_rate(b))] if probe is not None else []
    if probe is None or not readings or not rates:
        return no_gain(_NEEDS_PROBE)
    answers = tuple(a for burst in probe.bursts for a in burst if a.is_good)
    asked, tokens = max(len(b) for b in probe.bursts), statistics.median(a.tokens for a in answers)
    prompt, then = computed_of(answers) or 0.0, min(then, asked)
    measured = statistics.median(rates)
    gains = []
    for steps in readings:

        def rate(places: float, steps: Steps = steps) -> float:
            wall_s = _overhead_s(seen, steps) + burst_s(
                steps, asked=asked, places=max(1, min(asked, round(places))), prompt_tokens=prompt,
                answer_tokens=round(tokens), piece_tokens=_piece(seen),
                growth=seen.number("max_step_growth"),
            )  # fmt: skip
            return asked * tokens / wall_s

        gains.append(rate(then) / measured)
        if now is not None:
            gains.append(rate(then) / rate(now))
    basis = f"{readings[0].basis}; {then:g} together instead of {measured:,.3g} tokens/s"
    return _band(gains, "output tokens/s", basis)


def gain_of_places(seen: Observation, now: float, then: float) -> Gain:
    """Of the endpoint's own traffic: a request's prompt is work at any batch size, its tokens share
    their steps with more others than before."""
    readings = steps_of_traffic(seen)
    if not readings:
        return no_gain(_NEEDS_QUIET if seen.probe is not None else _NEEDS_PROBE)
    now, then = max(now, 1.0), max(then, 1.0)
    length, share = computed_prompt(seen) or _PROMPT_TOKENS, prompt_share(seen) or 0.0

    def token_s(steps: Steps, together: float) -> float:
        """Of an answer, with its share of the prompts."""
        return share * steps.prompt(length) / length + steps.decode(together) / together

    gains = [token_s(steps, now) / token_s(steps, then) for steps in readings]
    return _band(gains, "output tokens/s", f"{readings[0].basis}; {now:.3g} → {then:.3g} sequences")


def _overhead_s(seen: Observation, steps: Steps) -> float:
    """What a request takes beside its steps: the way there and back, its text and its tokens."""
    probe = seen.probe
    first = ttft_of(probe.short) if probe is not None else None
    tokens = computed_of(probe.short) if probe is not None else None
    if first is None or tokens is None or alone_s(probe) is None:
        return 0.0
    return max(0.0, first - steps.decode(1) - steps.prompt(tokens - 1))


def _piece(seen: Observation) -> float:
    return seen.number("max_batch_tokens") or _PIECE_TOKENS


def _band(gains: list[float], of: str, basis: str) -> Gain:
    return Gain(of=of, low=max(1.0, min(gains)), high=max(1.0, max(gains)), basis=basis)


def next_power(count: float) -> int:
    return 1 << max(0, math.ceil(math.log2(max(count, 1))))
