"""A plan for a person: the ranking, the picture, why others lost, and what to change.

Lines of at most 100 columns. Prints nothing and decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from headrace.search.answer import Answer, Band, Row, Why, grouped
from headrace.search.changes import Changes
from headrace.search.pareto import Point
from headrace.search.picture import Axes, terminal
from headrace.search.question import Question

WIDTH = 100
SHOWN = 10  # rows of the ranking; JSON has all
_PARTS = (
    "#",
    "deployment",
    "GPUs",
    "cost/month",
    "/M tokens",
    "TTFT p99",
    "TPOT p99",
    "holds to/s",
)


def head_lines(question: Question, models: Sequence[str]) -> list[str]:
    lengths = question.lengths
    tokens = f"{lengths.prompt_tokens:,.0f} tokens in, {lengths.output_tokens:,.0f} out"
    asked = f"{question.rate:g} requests/s, {tokens}; {objective(question)}"
    return wrap(f"{', '.join(models)}: {asked}", WIDTH)


def objective(question: Question) -> str:
    slo = question.slo
    times = [
        f"{name} within {show_time(value)}"
        for name, value in (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s), ("end to end", slo.e2e_s))
        if value is not None
    ]
    if not times:
        return "no objective but that the queue does not grow"
    return f"{' and '.join(times)} for {slo.share * 100:g}% of requests"


def ranking_lines(answer: Answer, *, several_models: bool) -> list[str]:
    cells = [_cells(number, row) for number, row in enumerate(answer.rows[:SHOWN], 1)]
    widths = [max(map(len, column)) for column in zip(_PARTS, *cells, strict=True)]
    lines = [_line(_PARTS, widths)]
    for row, shown in zip(answer.rows, cells, strict=False):
        lines.append(_line(shown, widths))
        one = row.candidate
        settings = (
            f"kv {one.kv_dtype}, {one.max_sequences:,} sequences, "
            f"{one.batch_tokens:,} tokens a step"
        )
        if several_models:
            settings = f"{row.candidate.model}; {settings}"
        lines.append(f"{'':{widths[0]}}  {settings}")
    if len(answer.rows) > SHOWN:
        lines.append(f"... and {len(answer.rows) - SHOWN} more (--json has all)")
    return lines


def _cells(number: int, row: Row) -> tuple[str, ...]:
    money = row.usd_month is not None
    held = "-" if row.holds_to is None else f"{row.holds_to[0]:.3g}-{row.holds_to[1]:.3g}"
    return (
        str(number),
        row.label,
        str(row.gpus),
        f"${row.usd_month:,.0f}" if money else f"{row.gpu_hours_month:,.0f} h",
        f"${row.usd_million:.3f}" if money else "-",
        show_band(row.ttft_p99_s),
        show_band(row.tpot_p99_s),
        held,
    )


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    left = [cells[0].rjust(widths[0]), cells[1].ljust(widths[1])]
    right = [cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True)]
    return "  ".join([*left, *right]).rstrip()


def reading_lines(answer: Answer) -> list[str]:
    """How to read the table."""
    priceless = any(row.usd_month is None for row in answer.rows)
    text = (
        "Bands run from the fast to the slow end of the cost model's known error and over seeds; "
        'the number of replicas holds at the slow end. "holds to": the objective is held up to '
        "the first rate and broken from the second on; no latency is given beyond it. A million "
        "tokens: prompts and answers together, at this rate all month (720 hours)."
    )
    if any(not row.measured for row in answer.rows):
        text += (
            " *: nobody's measurements of this kind of GPU are in the cost model; its band is the "
            "widest of all engines'."
        )
    if priceless:
        text += " h: GPU-hours a month, where no price is known; those rows come last."
    return wrap(text, WIDTH)


def points(rows: Sequence[Row], *, several_models: bool) -> list[Point]:
    """Cost against what a user sees. Rows without a price are left out if others have one."""
    priced = [row for row in rows if row.usd_month is not None]
    return [
        Point(
            label=f"{row.candidate.model}: {row.label}" if several_models else row.label,
            group=row.candidate.gpu,
            cost=float(row.gpus) if row.usd_month is None else row.usd_month,
            speed=_speed(row.tpot_p50_s.middle),
            speed_low=_speed(row.tpot_p50_s.high),
            speed_high=_speed(row.tpot_p50_s.low),
        )
        for row in (priced or rows)
    ]


def _speed(tpot_s: float) -> float:
    return 1 / tpot_s if tpot_s > 0 else 0.0


def axes(question: Question, rows: Sequence[Row], models: Sequence[str]) -> Axes:
    money = any(row.usd_month is not None for row in rows)
    return Axes(
        title=f"{', '.join(models)}: {question.rate:g} requests/s",
        cost="USD a month" if money else "GPUs",
        speed="tokens/s that a user sees",
        money=money,
    )


def picture_lines(question: Question, answer: Answer, models: Sequence[str]) -> list[str]:
    drawn = points(answer.rows, several_models=len(models) > 1)
    if len(drawn) < 2:
        return []
    picture = terminal(drawn, axes(question, answer.rows, models))
    return [line[:WIDTH] for line in picture.splitlines()]


def loss_lines(answer: Answer) -> list[str]:
    lines = []
    for group in grouped(answer.losses):
        lines.append(f"  {group.count:>5}  {group.why}")
        near = f"{group.nearest.candidate.label}: {group.nearest.text}"
        for number, line in enumerate(wrap(near, WIDTH - 18)):
            lines.append(f"         {'nearest: ' if number == 0 else '         '}{line}")
    return ["Why others lost (candidates, and the one that came nearest):", *lines] if lines else []


def nothing_lines(answer: Answer) -> list[str]:
    """That nothing holds the objective, and which bound makes it so."""
    bounds = (Why.TTFT, Why.TPOT, Why.RATE, Why.BUDGET, Why.MEMORY)
    near = [group.nearest for group in grouped(answer.losses) if group.why in bounds]
    lines = ["Nothing holds this objective."]
    if near:
        first = min(near, key=lambda loss: (bounds.index(loss.why), loss.least))
        lines += wrap(f"The bound: {first.candidate.label}: {first.text}.", WIDTH)
    return lines


def tally_lines(answer: Answer, notes: Sequence[str]) -> list[str]:
    tally = answer.tally
    looked = f"{tally.candidates:,} candidates, {tally.runs:,} runs, {tally.steps:,} steps"
    lines = [looked if answer.complete else f"Interrupted: this is what was known ({looked})."]
    fleet = answer.fleet
    if fleet is not None:
        lines.append(
            f"the first row as a fleet: {fleet.replicas} replicas behind a router, "
            f"{fleet.met_share:.1%} of requests within the objective"
        )
    for note in notes:
        lines += wrap(f"note: {note}", WIDTH, subsequent_indent="  ")
    return lines


def change_lines(changes: Changes) -> list[str]:
    base = changes.baseline
    lines = wrap(f"What to change, from {base.label}: {base.requests_s:.3g} requests/s", WIDTH)
    rows = [("", "change", "alone", "together", "")]
    for number, change in enumerate(changes.changes, 1):
        together = "-" if change.together is None else f"{change.together:.3g}/s"
        rows.append((str(number), change.name, f"x{change.alone:.2f}", together, change.remark))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for row in rows:
        cells = [row[0].rjust(widths[0]), row[1].ljust(widths[1])]
        cells += [row[2].rjust(widths[2]), row[3].rjust(widths[3])]
        line = "  ".join(cells)
        first, *rest = wrap(row[4], WIDTH - len(line) - 2) or [""]
        lines.append(f"{line}  {first}".rstrip())
        lines += [f"{'':{len(line)}}  {more}" for more in rest]
    return lines


def show_time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def show_band(band: Band) -> str:
    """200-260 ms; a single number where both ends look the same."""
    scale, unit = (1e3, "ms") if band.high < 1 else (1.0, "s")
    low, high = f"{band.low * scale:.3g}", f"{band.high * scale:.3g}"
    return f"{low} {unit}" if low == high else f"{low}-{high} {unit}"
