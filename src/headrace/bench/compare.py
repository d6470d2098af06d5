"""Two measurements, compared: better, worse or inconclusive, by intervals of ratios.

With three or more runs a side each run gives one value, and Welch's interval on logarithms holds
the ratio of their geometric means: this sees how runs of the same server differ. With fewer, the
ratio of medians comes from resampling requests; that sees only what happens within a run, and the
result says so. Two medians alone are never a verdict. Reads the detailed files of this bench and of
`vllm bench serve --save-detailed`.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from headrace.core.errors import ConfigError
from headrace.core.ratio import LEAST, Verdict, ratio_of_means, verdict_of

_LEAST_REQUESTS = 20
_RESAMPLES = 1000
_SLICES = 12
_DETAILS = ("ttfts", "itls", "input_lens", "output_lens", "errors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One file: values of whole answers."""

    name: str
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    e2e_s: tuple[float, ...]
    output_tokens_s: float
    rates: tuple[float, ...]  # of slices of the run
    mix: tuple[float, float]  # mean tokens of prompt and answer
    failed: int
    is_valid: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How many times as good the second is as the first: above 1 is better."""

    name: str
    unit: str
    before: float
    after: float
    low: float
    high: float

    @property
    def verdict(self) -> Verdict:
        return verdict_of(self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    @property
    def is_worse(self) -> bool:
        return any(row.verdict is Verdict.WORSE for row in self.rows)


def read_run(path: Path) -> Measured:
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}.", "Give files of --save.") from None
    missing = [key for key in _DETAILS if not isinstance(found, dict) or key not in found]
    if missing:
        raise ConfigError(
            f"{path} lacks {', '.join(missing)}.",
            "Compare files that were written with --save FILE --save-detailed.",
        )
    return _measured(path.name, found)


def _measured(name: str, found: Mapping[str, Any]) -> Measured:
    good = [
        (ttft, gaps, prompt, tokens, place)
        for place, (ttft, gaps, prompt, tokens, error) in enumerate(
            zip(*(found[key] for key in _DETAILS), strict=True)
        )
        if not error and tokens
    ]
    if len(good) < 2:
        raise ConfigError(f"{name} has {len(good)} whole answers; expected at least two.")
    starts = found.get("start_times")
    own = found.get("headrace") or {}
    return Measured(
        name=name,
        ttft_s=tuple(ttft for ttft, *_ in good),
        tpot_s=tuple(sum(gaps) / (tokens - 1) for _, gaps, _, tokens, _ in good if tokens > 1),
        e2e_s=tuple(ttft + sum(gaps) for ttft, gaps, *_ in good),
        output_tokens_s=float(found["output_throughput"]),
        rates=_rates([(starts[place], ttft, gaps) for ttft, gaps, _, _, place in good])
        if starts
        else (),
        mix=(
            statistics.fmean(prompt for _, _, prompt, _, _ in good),
            statistics.fmean(tokens for _, _, _, tokens, _ in good),
        ),
        failed=sum(bool(error) for error in found["errors"]),
        is_valid=bool(own.get("is_valid", True)),
    )


def _rates(answers: Sequence[tuple[float, float, Sequence[float]]]) -> tuple[float, ...]:
    """Tokens/s of twelve slices of the run, without the first and the last, where it starts and
    ends."""
    times = []
    for start_s, ttft_s, gaps in answers:
        at_s = start_s + ttft_s
        times.append(at_s)
        for gap_s in gaps:
            at_s += gap_s
            times.append(at_s)
    first, last = min(start for start, _, _ in answers), max(times)
    width = (last - first) / _SLICES
    if width <= 0:
        return ()
    counts = [0] * _SLICES
    for at_s in times:
        counts[min(_SLICES - 1, int((at_s - first) / width))] += 1
    return tuple(count / width for count in counts[1:-1])


def compare(before: Sequence[Measured], after: Sequence[Measured]) -> Comparison:
    """Several runs of each side, or one."""
    many = min(len(before), len(after)) >= LEAST
    kinds = (("TTFT", "ms", "ttft_s"), ("TPOT", "ms", "tpot_s"), ("whole answer", "ms", "e2e_s"))
    rows = []
    for name, unit, field in kinds:
        sides = [[list(getattr(run, field)) for run in side] for side in (before, after)]
        row = _by_runs(name, unit, sides) if many else _by_requests(name, unit, sides)
        if row is not None:
            rows.append(row)
    if many:
        rates = [[run.output_tokens_s for run in side] for side in (before, after)]
    else:
        rates = [[rate for run in side for rate in run.rates] for side in (before, after)]
    found = ratio_of_means(rates[0], rates[1])
    if found is not None:
        means = [statistics.fmean(run.output_tokens_s for run in side) for side in (before, after)]
        rows.append(Row(name="throughput", unit="tokens/s", before=means[0], after=means[1],
                        low=found[0], high=found[1]))  # fmt: skip
    return Comparison(rows=tuple(rows), notes=_notes(before, after, many))


def _by_runs(name: str, unit: str, sides: Sequence[Sequence[list[float]]]) -> Row | None:
    medians = [[statistics.median(values) for values in side if values] for side in sides]
    found = ratio_of_means(medians[0], medians[1])
    if found is None:
        return None
    means = [statistics.geometric_mean(side) for side in medians]
    return Row(name=name, unit=unit, before=means[0], after=means[1],
               low=1 / found[1], high=1 / found[0])  # fmt: skip


def _by_requests(name: str, unit: str, sides: Sequence[Sequence[list[float]]]) -> Row | None:
    pooled = [[value for values in side for value in values] for side in sides]
    if min(map(len, pooled)) < _LEAST_REQUESTS or min(map(min, pooled)) <= 0:
        return None
    medians = [statistics.median(side) for side in pooled]
    low, high = ratio_of_medians(*pooled)
    return Row(name=name, unit=unit, before=medians[0], after=medians[1],
               low=1 / high, high=1 / low)  # fmt: skip


def ratio_of_medians(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """An interval of median(after) / median(before), by resampling; always the same one."""
    random = Random(0)
    found = sorted(
        statistics.median(random.choices(after, k=len(after)))
        / statistics.median(random.choices(before, k=len(before)))
        for _ in range(_RESAMPLES)
    )
    return found[int(0.025 * _RESAMPLES)], found[int(0.975 * _RESAMPLES) - 1]


def _notes(before: Sequence[Measured], after: Sequence[Measured], many: bool) -> tuple[str, ...]:
    notes = []
    if not many:
        notes.append(
            "fewer than three runs a side: how runs of the same server differ is not seen; "
            "give FILE,FILE,FILE for each side"
        )
    for place, what in enumerate(("prompts", "answers")):
        means = [statistics.fmean(run.mix[place] for run in side) for side in (before, after)]
        if abs(means[0] - means[1]) > 0.05 * max(means):
            notes.append(f"{what} differ: {means[0]:,.0f} tokens and {means[1]:,.0f}")
    for run in (*before, *after):
        if not run.is_valid:
            notes.append(f"{run.name} is marked invalid: its client was not fit to measure")
        if run.failed:
            notes.append(f"{run.name}: {run.failed} requests failed and are not compared")
    return tuple(notes)


def rendered(found: Comparison) -> list[str]:
    lines = [f"{'':<14}{'before':>12}{'after':>12}   times as good (95%)    verdict"]
    for row in found.rows:
        scale = 1e3 if row.unit == "ms" else 1.0
        middle = math.sqrt(row.low * row.high)
        interval = f"{middle:.3f} ({row.low:.3f} to {row.high:.3f})"
        lines.append(
            f"{row.name:<14}{f'{row.before * scale:,.1f} {_unit(row)}':>12}"
            f"{f'{row.after * scale:,.1f} {_unit(row)}':>12}   {interval:<23}{row.verdict}"
        )
    return [*lines, *(f"note          {note}" for note in found.notes)]


def _unit(row: Row) -> str:
    return "t/s" if row.unit == "tokens/s" else row.unit
