"""Samples to medians, spreads and ratios, and those to one Markdown table and one JSON object.

Values in, values out: knows neither engines nor files.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from peers.workloads import Contender, Workload

OURS = "headrace"


@dataclass(slots=True)
class Cell:
    """What one contender gave in one row: a sample a round, and why there are none."""

    samples: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def median(self) -> float | None:
        return statistics.median(self.samples) if self.samples else None


@dataclass(slots=True)
class Results:
    cells: dict[tuple[Workload, Contender], Cell] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)  # by engine: version, flags, what was odd

    def cell(self, workload: Workload, contender: Contender) -> Cell:
        return self.cells.setdefault((workload, contender), Cell())


@dataclass(frozen=True, slots=True)
class Ratio:
    value: float
    contender: Contender  # the peer that it is a ratio to


def find_ratio(results: Results, workload: Workload, *, same_format: bool = False) -> Ratio | None:
    """Our first contender over the best peer; with `same_format`, over those that read the same
    weights. None where one of both is missing."""
    row = [(who, cell) for (what, who), cell in results.cells.items() if what == workload]
    ours = next((pair for pair in row if pair[0].engine == OURS), None)
    if ours is None or ours[1].median is None:
        return None
    peers = [
        (cell.median, who)
        for who, cell in row
        if who.engine != OURS
        and cell.median is not None
        and (not same_format or who.format == ours[0].format)
    ]
    if not peers:
        return None
    best = (min if workload.lower_is_better else max)(peers, key=lambda pair: pair[0])
    return Ratio(ours[1].median / best[0], best[1])


def meets(workload: Workload, ratio: Ratio) -> bool:
    if workload.lower_is_better:
        return ratio.value <= workload.target
    return ratio.value >= workload.target


def show_cell(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell.median is None:
        return f"failed: {_one_line(cell.failures[-1])}" if cell.failures else ""
    spread = ""
    if len(cell.samples) > 1:
        spread = f" ({_figure(min(cell.samples))}-{_figure(max(cell.samples))})"
    failed = f", {len(cell.failures)} failed" if cell.failures else ""
    return f"{_figure(cell.median)}{spread}{failed}"


def render_markdown(
    results: Results, workloads: Sequence[Workload], heading: str, machine: str
) -> str:
    """Rows are workloads, columns contenders; the ratios are of our first contender."""
    contenders = _columns(results, workloads)
    titles = ["", *(who.name for who in contenders), "ours / best peer", "same weights", "target"]
    lines = [f"## {heading}", "", machine, "", _line(titles), _line(["---"] * len(titles))]
    for workload in workloads:
        cells = [show_cell(results.cells.get((workload, who))) for who in contenders]
        ratios = [
            _show_ratio(workload, find_ratio(results, workload)),
            _show_ratio(workload, find_ratio(results, workload, same_format=True), judged=False),
        ]
        sign = "at most" if workload.lower_is_better else "at least"
        target = f"{sign} {workload.target:g}×"
        lines.append(_line([f"{workload.name}, {workload.unit}", *cells, *ratios, target]))
    lines.append("")
    lines += [f"- {engine}: {note}" for engine, note in sorted(results.notes.items())]
    return "\n".join(lines) + "\n"


def to_json(
    results: Results, workloads: Sequence[Workload], machine: str, rounds: int
) -> dict[str, Any]:
    rows = []
    for workload in workloads:
        best = find_ratio(results, workload)
        same = find_ratio(results, workload, same_format=True)
        rows.append(
            {
                "name": workload.name,
                "unit": workload.unit,
                "lower_is_better": workload.lower_is_better,
                "target_ratio": workload.target,
                "ratio": best.value if best else None,
                "best_peer": best.contender.name if best else None,
                "meets_target": meets(workload, best) if best else None,
                "same_weights_ratio": same.value if same else None,
                "contenders": {
                    who.name: {
                        "median": cell.median,
                        "samples": cell.samples,
                        "failures": cell.failures,
                    }
                    for (what, who), cell in results.cells.items()
                    if what == workload
                },
            }
        )
    return {"machine": machine, "rounds": rounds, "notes": results.notes, "rows": rows}


def _columns(results: Results, workloads: Sequence[Workload]) -> list[Contender]:
    found = [who for what, who in results.cells if what in workloads]
    return list(dict.fromkeys(found))


def _show_ratio(workload: Workload, ratio: Ratio | None, *, judged: bool = True) -> str:
    if ratio is None:
        return ""
    shown = f"{ratio.value:.2f}× ({ratio.contender.name})"
    return f"**{shown}**" if judged and meets(workload, ratio) else shown


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _one_line(text: str, limit: int = 160) -> str:
    line = " ".join(text.replace("|", "/").split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
