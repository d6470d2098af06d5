"""Cost a month against tokens a month: stairs for replicas, a line for each API, where they meet.

Draws an SVG file, or characters for a terminal; what it draws comes from cost.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from headrace.search.cost import BreakEven, Hosting, show_tokens

_WIDTH, _HEIGHT = 820, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 200, 44, 56
_OWN = "#333333"
_COLOURS = ("#d95f02", "#1f77b4", "#2ca02c", "#9467bd", "#c2185b", "#8c6d31", "#0097a7")
_MARKS = "abcdefghijklmnopqrstuvwxyz"
_MOST_MARKED = 40  # replicas whose beginning is marked
_MOST_STEPS = 400  # beyond that nobody sees stairs, and a line is drawn
_MILLION = 1e6

_Place = Callable[[float], float]  # a value -> where it lies in the picture


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What is drawn: the stairs' corners and the lines' prices, up to `most_tokens`."""

    hosting: Hosting
    breaks: tuple[BreakEven, ...]
    most_tokens: float
    most_usd: float
    at_tokens: float | None  # the user's own volume


def chart_of(
    hosting: Hosting, breaks: Sequence[BreakEven], tokens: float | None = None
) -> Chart | None:
    """None: without a price there is nothing to draw."""
    if hosting.replica_usd is None or not breaks:
        return None
    points = [(each.lasting_tokens or each.tokens or 0) * 1.3 for each in breaks]
    seen = min(max(points), hosting.capacity_tokens * _MOST_MARKED)
    most_tokens = _round_up(max(seen, hosting.capacity_tokens * 2, (tokens or 0) * 1.3))
    highest = hosting.usd_for(most_tokens)
    assert highest is not None
    # Up to the stairs' end: an API that is far dearer leaves the picture at the top.
    dearest = max(each.api_usd_per_million for each in breaks) * most_tokens / _MILLION
    return Chart(
        hosting=hosting,
        breaks=tuple(breaks),
        most_tokens=most_tokens,
        most_usd=_round_up(max(highest, min(dearest, highest * 2))),
        at_tokens=tokens,
    )


def stairs(chart: Chart) -> list[tuple[float, float]]:
    """Corners (tokens, USD) of what hosting costs, up to the end of the picture."""
    hosting, found = chart.hosting, []
    count = hosting.replicas_for(chart.most_tokens)
    if count > _MOST_STEPS:
        return [(at, hosting.usd_for(at) or 0.0) for at in (0.0, chart.most_tokens)]
    for replicas in range(1, count + 1):
        end = min(replicas * hosting.capacity_tokens, chart.most_tokens)
        usd = hosting.usd_for(end)
        assert usd is not None
        found += [((replicas - 1) * hosting.capacity_tokens, usd), (end, usd)]
    return found


def svg(chart: Chart) -> str:
    """A picture of 820 by 440."""

    def x(tokens: float) -> float:
        return round(_LEFT + tokens / chart.most_tokens * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(usd: float) -> float:
        share = min(usd / chart.most_usd, 1.0)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)

    lines = _frame(chart)
    count = chart.hosting.replicas_for(chart.most_tokens)
    for replicas in range(1, count if count <= _MOST_MARKED else 1):
        at = x(replicas * chart.hosting.capacity_tokens)
        lines.append(
            f'<line x1="{at}" y1="{_TOP}" x2="{at}" y2="{_HEIGHT - _BOTTOM}" stroke="#bbb"'
            f' stroke-dasharray="3 4"><title>needs {replicas + 1} replicas from here on</title>'
            "</line>"
        )
        if replicas <= 6:
            label = f"{replicas + 1} replicas"
            lines.append(f'<text x="{at + 4}" y="{_TOP + 12}" fill="#777">{label}</text>')
    for number, each in enumerate(chart.breaks):
        lines += _api_line(chart, each, _COLOURS[number % len(_COLOURS)], x, y)
    corners = " ".join(f"{x(tokens)},{y(usd)}" for tokens, usd in stairs(chart))
    lines.append(f'<polyline points="{corners}" fill="none" stroke="{_OWN}" stroke-width="2.2"/>')
    if chart.at_tokens is not None and chart.at_tokens <= chart.most_tokens:
        at = x(chart.at_tokens)
        lines.append(
            f'<line x1="{at}" y1="{_TOP}" x2="{at}" y2="{_HEIGHT - _BOTTOM}" stroke="#000"/>'
            f'<text x="{at + 4}" y="{_HEIGHT - _BOTTOM - 6}">'
            f"you: {show_tokens(chart.at_tokens)}</text>"
        )
    body = "\n".join(lines + _legend(chart))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}"'
        f' viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">\n'
        f"{body}\n</svg>\n"
    )


def _api_line(chart: Chart, each: BreakEven, colour: str, x: _Place, y: _Place) -> list[str]:
    """From nothing to the picture's edge, with a ring at each break-even."""
    price = each.api_usd_per_million / _MILLION
    end = chart.most_tokens if price <= 0 else min(chart.most_tokens, chart.most_usd / price)
    lines = [
        f'<line x1="{x(0)}" y1="{y(0)}" x2="{x(end)}" y2="{y(price * end)}"'
        f' stroke="{colour}" stroke-width="1.8"/>'
    ]
    for at in dict.fromkeys((each.tokens, each.lasting_tokens)):
        if at is not None and at <= chart.most_tokens:
            lines.append(
                f'<circle cx="{x(at)}" cy="{y(price * at)}" r="4.5" fill="white"'
                f' stroke="{colour}" stroke-width="2"><title>break-even with '
                f"{escape(each.api.name)}: {show_tokens(at)} tokens a month</title></circle>"
            )
    return lines


def _frame(chart: Chart) -> list[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    lines = [
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="15" font-weight="bold">'
        "Cost a month against tokens a month</text>",
    ]
    for step in range(6):
        across = _LEFT + step / 5 * (right - _LEFT)
        up = bottom - step / 5 * (bottom - _TOP)
        lines += [
            f'<line x1="{_LEFT}" y1="{up:.1f}" x2="{right}" y2="{up:.1f}" stroke="#e8e8e8"/>',
            f'<text x="{_LEFT - 8}" y="{up + 4:.1f}" text-anchor="end">'
            f"{_usd(chart.most_usd * step / 5)}</text>",
            f'<text x="{across:.1f}" y="{bottom + 18}" text-anchor="middle">'
            f"{show_tokens(chart.most_tokens * step / 5)}</text>",
        ]
    return lines


def _legend(chart: Chart) -> list[str]:
    across, down = _WIDTH - _RIGHT + 14, _TOP + 10
    lines = []
    named = [(_OWN, "hosted: GPUs and work")]
    named += [
        (_COLOURS[n % len(_COLOURS)], f"{each.api.name} (${each.api_usd_per_million:,.3g}/M)")
        for n, each in enumerate(chart.breaks)
    ]
    for colour, label in named:
        lines.append(
            f'<line x1="{across}" y1="{down - 4}" x2="{across + 16}" y2="{down - 4}"'
            f' stroke="{colour}" stroke-width="2.5"/>'
            f'<text x="{across + 22}" y="{down}" font-size="11">{escape(label)}</text>'
        )
        down += 18
    return lines


def terminal(chart: Chart, *, width: int = 76, height: int = 14) -> str:
    """The same in characters: # is hosting, letters are APIs, | your own volume."""
    grid = [[" "] * width for _ in range(height)]

    def put(column: int, usd: float, mark: str) -> None:
        row = height - 1 - round(usd / chart.most_usd * (height - 1))
        if 0 <= row < height:
            grid[row][column] = mark

    if chart.at_tokens is not None and chart.at_tokens <= chart.most_tokens:
        at = round(chart.at_tokens / chart.most_tokens * (width - 1))
        for row in range(height):
            grid[row][at] = "|"
    for column in range(width):
        tokens = column / (width - 1) * chart.most_tokens
        for mark, each in zip(_MARKS, chart.breaks, strict=False):
            put(column, each.api_usd_per_million * tokens / _MILLION, mark)
        usd = chart.hosting.usd_for(tokens)
        assert usd is not None
        put(column, usd, "#")
    lines = ["USD a month (up) against tokens a month (right)"]
    for row, cells in enumerate(grid):
        name = _usd(chart.most_usd * (height - 1 - row) / (height - 1)) if row % 4 == 1 else ""
        lines.append(f"{name:>9} |{''.join(cells)}".rstrip())
    lines.append(f"{'':>9} +{'-' * width}")
    lines.append(f"{'0':>11}{show_tokens(chart.most_tokens):>{width}}")
    named = [f"{m} {each.api.name}" for m, each in zip(_MARKS, chart.breaks, strict=False)]
    own = ["# hosted", *named] + ([] if chart.at_tokens is None else ["| your volume"])
    return "\n".join([*lines, "  " + "   ".join(own)])


def _round_up(value: float) -> float:
    """To 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8 or 10 times a power of ten."""
    if value < 1e-6:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    factors = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
    return next(unit * f for f in factors if unit * f >= value * (1 - 1e-9))


def _usd(value: float) -> str:
    return f"${value / 1000:,.4g}k" if value >= 10_000 else f"${value:,.4g}"
