"""Timings of requests to figures, their medians and ratios, and those to a Markdown table.

Values in, values out: knows neither servers nor files.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from served_anchors import vllm_figure
from served_load import Timing


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run, or medians of several. TTFT: until the first text; TPOT: a request's mean time
    between tokens after its first."""

    output_per_s: float
    total_per_s: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    tpot_p50_ms: float
    tpot_p95_ms: float


def percentile(values: Iterable[float], share: float) -> float:
    """Between the two nearest, by how near each is."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def figures_of(timings: Sequence[Timing], prompt_tokens: int) -> Figures:
    """`prompt_tokens`: of all requests together."""
    taken_s = max(t.last_s for t in timings) - min(t.began_s for t in timings)
    output = sum(t.tokens for t in timings)
    ttft = [1e3 * (t.first_s - t.began_s) for t in timings]
    tpot = [1e3 * (t.last_s - t.first_s) / (t.tokens - 1) for t in timings if t.tokens > 1]
    return Figures(
        output_per_s=output / taken_s,
        total_per_s=(output + prompt_tokens) / taken_s,
        ttft_p50_ms=percentile(ttft, 0.5),
        ttft_p95_ms=percentile(ttft, 0.95),
        tpot_p50_ms=percentile(tpot or [0.0], 0.5),
        tpot_p95_ms=percentile(tpot or [0.0], 0.95),
    )


def medians(runs: Sequence[Figures]) -> Figures:
    return Figures(
        **{f.name: statistics.median(getattr(run, f.name) for run in runs) for f in fields(Figures)}
    )


@dataclass(frozen=True, slots=True)
class Row:
    """One workload under one way to sample."""

    workload: str
    sampling: str
    runs: list[Figures]
    of_greedy: float | None  # median over rounds of the ratio of output tokens a second

    @property
    def figures(self) -> Figures:
        return medians(self.runs)

    def of_vllm(self) -> dict[str, float]:
        """Our figure over vLLM's, where there is one: above 1 is good of a rate, bad of a time."""
        found = {}
        for field in fields(Figures):
            theirs = vllm_figure(self.workload, self.sampling, field.name)
            if theirs is not None:
                found[field.name] = getattr(self.figures, field.name) / theirs
        return found


def make_row(
    workload: str, sampling: str, runs: Sequence[Figures], greedy: Sequence[Figures]
) -> Row:
    """Runs of the same round are compared: the machine is another one a minute later."""
    pairs = zip(runs, greedy, strict=False)  # a round that was cut short has one of both
    ratios = [run.output_per_s / base.output_per_s for run, base in pairs]
    return Row(workload, sampling, list(runs), statistics.median(ratios) if ratios else None)


def markdown(rows: Sequence[Row], *, with_anchors: bool) -> str:
    """Behind a time stands its ratio to vLLM's, where that is known."""
    lines = [
        "| workload | sampling | output tok/s | all tok/s | TTFT p50 / p95, ms | "
        "TPOT p50 / p95, ms | of greedy | of vLLM |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        of_vllm = row.of_vllm() if with_anchors else {}
        figures = row.figures
        times = [
            _shown(getattr(figures, name)) + (f" ({of_vllm[name]:.2f}x)" if name in of_vllm else "")
            for name in ("ttft_p50_ms", "ttft_p95_ms", "tpot_p50_ms", "tpot_p95_ms")
        ]
        rates = [run.output_per_s for run in row.runs]
        spread = f" ({_shown(min(rates))}-{_shown(max(rates))})" if len(rates) > 1 else ""
        rate = of_vllm.get("output_per_s", of_vllm.get("total_per_s"))
        lines.append(
            f"| {row.workload} | {row.sampling} | {_shown(figures.output_per_s)}{spread} | "
            f"{_shown(figures.total_per_s)} | {times[0]} / {times[1]} | {times[2]} / {times[3]} | "
            f"{_ratio(row.of_greedy)} | {_ratio(rate)} |"
        )
    return "\n".join(lines)


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"
