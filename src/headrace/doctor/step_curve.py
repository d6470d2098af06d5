"""The time of a step as a function of what is in it, from a profile, from probes or from metrics.

    step = decode(sequences) + prompt(tokens)

`decode(1)` is the time per token of one stream. What one more sequence adds is taken, in this
order, from a profile of `headrace calibrate`, from bursts that really ran together, or from prompts
of a few tokens: a prompt of n tokens is a step of n rows on any engine, also on one with a single
place. A decoded row then costs more than a prompt's row by the output layer, which the ledger has
where the model is known; and where the cores that compute also carry every token to its client, by
what that takes. Two candidates make a band. Knows values; asks nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from headrace.doctor.observation import (
    Answer,
    MeasuredSteps,
    Observation,
    Probe,
    prompt_of,
    tpot_of,
    ttft_of,
)
from headrace.simulate.curve import Line

_SMALL_BATCH = 3.0  # how much more than a token of a long prompt a decoded one may cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """One reading of the step's time. `decode` by sequences, `prompt` by tokens: what a piece of a
    prompt adds to a step."""

    decode: Line
    prompt: Line
    basis: str

    def rate(self, sequences: float) -> float:
        """Tokens a second of so many sequences together."""
        return sequences / self.decode(sequences)


def steps_of_burst(seen: Observation) -> tuple[Steps, ...]:
    """Readings for the probes' bursts: each is possible, none is preferred."""
    probe = seen.probe
    alone = alone_s(probe)
    if probe is None or alone is None:
        return ()
    if seen.steps is not None:
        return (_profiled(seen.steps, alone),)
    prompt = prompt_line(probe)
    if prompt is None:
        return ()
    joined = max((overlap(burst) for burst in probe.bursts), default=0.0)
    adds = sorted(add for burst in probe.bursts for add in _adds(burst, alone))
    if joined >= 2 and len(adds) >= 4:
        quarter = len(adds) // 4
        return tuple(
            Steps(decode=Line({1: alone, 2: alone + max(0.0, each)}), prompt=prompt,
                  basis=f"steps measured at {joined:.1f} sequences")
            for each in (adds[quarter], adds[-1 - quarter])
        )  # fmt: skip
    return tuple(_of_rows(probe, alone, prompt, seen))


def steps_of_traffic(seen: Observation) -> tuple[Steps, ...]:
    """Readings for the endpoint's own traffic. Probes that ran beside others' requests measured
    those too: then the engine's own histograms tell more."""
    if seen.steps is not None:
        return (_profiled(seen.steps, None),)
    busy = (seen.highest("running") or 0) + (seen.highest("waiting") or 0) >= 1
    if not busy:
        return steps_of_burst(seen)
    gap, running = seen.mean("itl") or seen.mean("tpot"), _running(seen)
    if gap is None or not running:
        return ()
    shown = f"{gap * 1e3:.3g} ms a step at {running:.3g} sequences and its prompts' times"
    return tuple(
        Steps(decode=Line({1: step - (running - 1) * row, running + 1: step + row}),
              prompt=Line({0: 0.0, 1: cost}), basis=shown)
        for step, cost, row in sorted(_costs(seen, gap, running))
    )  # fmt: skip


def _running(seen: Observation) -> float | None:
    """Sequences of a step, on average: a sample of none is one between two steps."""
    some = [level for level in seen.levels.get("running", ()) if level >= 1]
    return statistics.fmean(some) if some else None


def _costs(seen: Observation, gap: float, running: float) -> set[tuple[float, float, float]]:
    """Seconds of a step without prompts, what a token of a prompt adds, and what a sequence does:
    by what the engine exports, at least and at most."""
    each = seen.mean("prompt_token_time")  # llama.cpp
    found = {(gap, each)} if each is not None else _costs_of_totals(seen, gap)
    found = found or _costs_of_requests(seen, gap, running)
    # A row never takes more than its share of a step in which there are several.
    return {
        (step, min(cost, step / running), min(ratio * cost + carry, step / running))
        for step, cost in found
        for ratio, carry in zip((1.0, seen.row_ratio or 1.0), _carried(seen), strict=True)
    }


def _costs_of_totals(seen: Observation, gap: float) -> set[tuple[float, float]]:
    """All steps together take their number times a step without prompts, and what prompts add. A
    step without prompts takes the usual gap between tokens; the mean gap has some prompts in it, so
    what is left over then is the least that prompts took."""
    steps, tokens = _steps(seen), _computed_tokens(seen)
    usual = seen.histograms["itl"].about(0.5) if "itl" in seen.histograms else None
    if not steps or not tokens or usual is None:
        return set()
    spent, usual = sum(seen.groups.get("step_parts", {}).values()) or seen.period_s, min(usual, gap)
    most, least = ((spent - steps * each) / tokens for each in (usual, gap))
    return {(usual, most), (gap, max(least, most / 2))} if most > 0 else set()


def _steps(seen: Observation) -> float | None:
    """How many there were; None where the engine does not tell, or had nothing to do at times."""
    idle = [level < 1 for level in seen.levels.get("waiting", ())]
    told = seen.histograms.get("iteration_tokens")
    count = seen.deltas.get("steps") or (told.count if told is not None else None)
    return None if any(idle) and "step_parts" not in seen.groups else count


def _costs_of_requests(seen: Observation, gap: float, running: float) -> set[tuple[float, float]]:
    """The time of a prompt's steps has that of others' tokens in it: one step's at least, and where
    steps with prompts may take `growth` times as long as those without, a share of all of them."""
    work, tokens = seen.mean("prefill_time"), computed_prompt(seen)
    if work is None or not tokens:
        return set()
    growth = seen.number("max_step_growth")
    costs = {(gap, max(0.0, work - gap) / tokens)}
    if growth is not None and growth > 1 and running > 1:
        costs.add((gap, work * (1 - 1 / growth) / tokens))
    return costs


def _profiled(found: MeasuredSteps, alone: float | None) -> Steps:
    """As it was measured; a machine that is slower or faster today is so in all of it."""
    decode = Line(dict(found.decode_s))
    scale = alone / decode(1) if alone is not None and decode(1) > 0 else 1.0
    return Steps(
        decode=Line({rows: scale * seconds for rows, seconds in found.decode_s}),
        prompt=Line({0: 0.0, **{rows: scale * seconds for rows, seconds in found.prompt_s}}),
        basis=found.source,
    )


def _of_rows(probe: Probe, alone: float, prompt: Line, seen: Observation) -> Iterator[Steps]:
    """No burst ran together: rows of prompts stand for rows of sequences."""
    carried = _carried(seen)
    if _small(probe):
        ratios, what = (1.0, seen.row_ratio or 1.0), "prompts of a few tokens"
    else:  # a long prompt's tokens share more than a few rows do
        ratios, what = (1.0, _SMALL_BATCH), "what a token of a long prompt adds"
    if carried[1]:
        what += f" and {carried[1] * 1e3:.2g} ms of CPU time to carry a token"
    counts = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
    for ratio, carry in sorted(set(zip(ratios, carried, strict=True))):
        points = {n: alone + ratio * prompt(n - 1) + carry * (n - 1) for n in counts}
        yield Steps(decode=Line(points), prompt=prompt, basis=f"from {what}")


def _carried(seen: Observation) -> tuple[float, float]:
    """What carrying one more token adds to a step on cores that compute as well: at least its
    share where all of them take turns, at most all of it, since a step waits for its last core."""
    if seen.carry_s is None:
        return 0.0, 0.0
    return seen.carry_s / max(1, seen.cores or 1), seen.carry_s


def prompt_line(probe: Probe) -> Line | None:
    """What n tokens of a prompt add to a step, from the first tokens' times of prompts of several
    lengths: what a request takes beside its step is the same in all of them."""
    points = dict(_small(probe))
    if points:
        tokens, ttft = prompt_of(probe.medium), ttft_of(probe.medium)
        if tokens is not None and ttft is not None and tokens > 2 * max(points):
            points[tokens] = ttft
        least = min(points)
        base = points[least]
        more = {rows - least: seconds - base for rows, seconds in points.items()}
        line = {0.0: 0.0} | {at: max(0.0, added) for at, added in more.items() if at > 0}
        if len(line) > 1:
            return Line(line)
    cost = token_cost_s(probe)
    return None if cost is None else Line({0: 0.0, 1: cost})


def _small(probe: Probe) -> tuple[tuple[float, float], ...]:
    """Computed tokens and median TTFT of prompts of a few tokens, where there are two sizes."""
    groups: dict[int, list[Answer]] = {}
    for answer in probe.sizes:
        if answer.is_good and answer.prompt_tokens:
            groups.setdefault(answer.prompt_tokens - (answer.cached_tokens or 0), []).append(answer)
    found: dict[int, list[float]] = {}
    for rows in sorted(groups):  # a word may be two tokens: sizes that are near are one
        near = next((at for at in found if rows <= 1.25 * at + 1), rows)
        found.setdefault(near, []).extend(a.ttft_s for a in groups[rows] if a.ttft_s is not None)
    points = tuple((float(rows), statistics.median(times)) for rows, times in found.items())
    return points if len(points) >= 2 else ()


def overlap(burst: tuple[Answer, ...]) -> float:
    """How many of a burst's answers were being written at the same time, on average over the time
    in which any was."""
    spans = [
        (a.ttft_s, a.end_s)
        for a in burst
        if a.is_good and a.ttft_s is not None and a.end_s is not None and a.end_s > a.ttft_s
    ]
    edges = sorted({edge for span in spans for edge in span})
    busy = weighted = 0.0
    for low, high in pairwise(edges):
        inside = sum(1 for first, last in spans if first <= low and last >= high)
        if inside:
            busy += high - low
            weighted += inside * (high - low)
    return weighted / busy if busy > 0 else 0.0


def burst_rate(burst: tuple[Answer, ...]) -> float | None:
    """Tokens of all answers over the wall time from the schedule to the last token."""
    good = [a for a in burst if a.is_good and a.end_s is not None]
    ends = [a.end_s for a in good if a.end_s is not None]
    return sum(a.tokens for a in good) / max(ends) if ends else None


def alone_rate(probe: Probe) -> float | None:
    tpot = tpot_of(probe.short)
    return 1 / tpot if tpot else None


def alone_s(probe: Probe | None) -> float | None:
    """The time per token of one stream, next to the bursts where it can be."""
    if probe is None:
        return None
    return tpot_of(probe.references) or tpot_of(probe.short) or None


def token_cost_s(probe: Probe) -> float | None:
    """What one more prompt token costs: the slope from short prompts to the next longer ones, since
    attention makes those of long prompts dearer."""
    for many in (probe.medium, probe.cold, probe.long):
        tokens, base = prompt_of(many), prompt_of(probe.short)
        late, early = ttft_of(many), ttft_of(probe.short)
        if tokens is None or base is None or late is None or early is None:
            continue
        if tokens > 2 * base and late > early:
            return (late - early) / (tokens - base)
    return None


def computed_prompt(seen: Observation) -> float | None:
    """Tokens of a mean request's prompt that are computed, in the endpoint's own traffic."""
    length = seen.mean("prompt_length")
    if length is None:
        return None
    return length * _missed(seen)


def prompt_share(seen: Observation) -> float | None:
    """Prompt tokens that are computed for each token of an answer, in the endpoint's own traffic:
    by counters, which see requests that have not ended yet; else by a mean request."""
    made, computed = seen.deltas.get("generation_tokens"), _computed_tokens(seen)
    if made and computed is not None:
        return computed / made
    length, answer = computed_prompt(seen), seen.mean("generation_length")
    return length / answer if length is not None and answer else None


def _computed_tokens(seen: Observation) -> float | None:
    """Of prompts, in the endpoint's own traffic."""
    asked = seen.deltas.get("prompt_tokens")
    computed = seen.deltas.get("computed_prompt_tokens")
    return asked * _missed(seen) if computed is None and asked is not None else computed


def _missed(seen: Observation) -> float:
    """The share of prompts that the prefix cache does not have."""
    hits, asked = seen.deltas.get("prefix_hits"), seen.deltas.get("prefix_queries")
    return 1 - hits / asked if hits is not None and asked else 1.0


def _adds(burst: tuple[Answer, ...], alone: float) -> Iterator[float]:
    """What another sequence added to a step, by each answer: its median gap, which the few steps
    with prompts in them do not move, and how many were being written beside it."""
    good = [a for a in burst if a.is_good and a.tpot_s and len(a.arrivals_s) >= 4]
    for one in good:
        first, last = one.arrivals_s[0], one.arrivals_s[-1]
        if last <= first:
            continue
        beside = sum(
            max(0.0, min(last, a.arrivals_s[-1]) - max(first, a.arrivals_s[0])) for a in good
        ) / (last - first)
        chunk_tokens = max(1.0, (one.tokens - 1) / (len(one.arrivals_s) - 1))
        gap = statistics.median(b - a for a, b in pairwise(one.arrivals_s)) / chunk_tokens
        if beside > 1.5:
            yield (gap - alone) / (beside - 1)
