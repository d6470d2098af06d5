"""The Pareto front as a picture: an SVG file, and characters for a terminal.

Draws points and the line of what nothing beats; decides nothing about them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from headrace.search.pareto import Point, front_of

_WIDTH, _HEIGHT = 820, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 210, 44, 58  # margins; the legend stands at the right
_COLOURS = ("#1f77b4", "#d95f02", "#2ca02c", "#9467bd", "#c2185b", "#8c6d31", "#0097a7", "#555555")
_MARKS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    title: str
    cost: str  # what stands below: "USD a month", "GPUs"
    speed: str  # what stands at the left
    money: bool = True


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    step: float

    def share(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        count = round((self.high - self.low) / self.step)
        return [self.low + i * self.step for i in range(count + 1)]


class _Plane:
    """Where a cost and a speed lie in the picture."""

    def __init__(self, points: Sequence[Point]) -> None:
        self.across, self.up = _scale([p.cost for p in points]), _scale(_speeds(points))

    def x(self, cost: float) -> float:
        return round(_LEFT + self.across.share(cost) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, speed: float) -> float:
        return round(_HEIGHT - _BOTTOM - self.up.share(speed) * (_HEIGHT - _TOP - _BOTTOM), 1)


def svg(points: Sequence[Point], axes: Axes) -> str:
    """A picture of 820 by 460; every dot's title says what it is, for a pointer over it."""
    plane = _Plane(points)
    groups = list(dict.fromkeys(p.group for p in points))
    front = front_of(points)
    lines = _frame(axes, plane)
    corners = [(plane.x(points[i].cost), plane.y(points[i].speed)) for i in front]
    stairs = " ".join(_stairs(corners))
    lines.append(f'<polyline points="{stairs}" fill="none" stroke="#333" stroke-width="1.2"/>')
    for index, point in enumerate(points):
        colour = _COLOURS[groups.index(point.group) % len(_COLOURS)]
        lines += _dot(point, colour, plane, on_front=index in front)
    for mark, (x, y) in zip(_MARKS, corners, strict=False):
        lines.append(f'<text x="{x + 7}" y="{y - 7}" font-weight="bold">{mark}</text>')
    lines += _legend(points, front, groups)
    body = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}"'
        f' viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">\n'
        f"{body}\n</svg>\n"
    )


def _frame(axes: Axes, plane: _Plane) -> list[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    lines = [
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="15" font-weight="bold">{escape(axes.title)}</text>',
    ]
    for tick in plane.across.ticks():
        at = plane.x(tick)
        lines.append(f'<line x1="{at}" y1="{_TOP}" x2="{at}" y2="{bottom}" stroke="#e4e4e4"/>')
        shown = escape(_tick(tick, axes.money))
        lines.append(f'<text x="{at}" y="{bottom + 18}" text-anchor="middle">{shown}</text>')
    for tick in plane.up.ticks():
        at = plane.y(tick)
        lines.append(f'<line x1="{_LEFT}" y1="{at}" x2="{right}" y2="{at}" stroke="#e4e4e4"/>')
        lines.append(
            f'<text x="{_LEFT - 8}" y="{at + 4}" text-anchor="end">{_tick(tick, False)}</text>'
        )
    middle = (_TOP + bottom) / 2
    lines += [
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 16}" text-anchor="middle">'
        f"{escape(axes.cost)}</text>",
        f'<text transform="translate(20 {middle}) rotate(-90)" text-anchor="middle">'
        f"{escape(axes.speed)}</text>",
    ]
    return lines


def _dot(point: Point, colour: str, plane: _Plane, *, on_front: bool) -> list[str]:
    x, y = plane.x(point.cost), plane.y(point.speed)
    low, high = plane.y(point.speed_low), plane.y(point.speed_high)
    fill = colour if on_front else "white"
    return [
        f'<line x1="{x}" y1="{low}" x2="{x}" y2="{high}" stroke="{colour}" stroke-opacity="0.55"/>',
        f'<circle cx="{x}" cy="{y}" r="4.5" fill="{fill}" stroke="{colour}"'
        f' stroke-width="1.6"><title>{escape(point.label)}</title></circle>',
    ]


def _legend(points: Sequence[Point], front: Sequence[int], groups: Sequence[str]) -> list[str]:
    across, lines = _WIDTH - _RIGHT + 16, []
    down = _TOP + 10
    for number, group in enumerate(groups):
        colour = _COLOURS[number % len(_COLOURS)]
        lines.append(f'<circle cx="{across}" cy="{down - 4}" r="4.5" fill="{colour}"/>')
        lines.append(f'<text x="{across + 10}" y="{down}">{escape(group)}</text>')
        down += 18
    down += 8
    lines.append(f'<text x="{across - 5}" y="{down}" font-weight="bold">Nothing beats</text>')
    for mark, index in zip(_MARKS, front, strict=False):
        down += 17
        shown = escape(f"{mark}  {points[index].label}")
        lines.append(f'<text x="{across - 5}" y="{down}" font-size="10">{shown}</text>')
    return lines


def _stairs(corners: Sequence[tuple[float, float]]) -> list[str]:
    """More money buys nothing until the next point: level, then up."""
    found: list[str] = []
    for number, (across, down) in enumerate(corners):
        if number:
            found.append(f"{across},{corners[number - 1][1]}")
        found.append(f"{across},{down}")
    return found


def terminal(points: Sequence[Point], axes: Axes, *, width: int = 78, height: int = 14) -> str:
    """The same in characters: letters are the front, dots are the rest."""
    across, up = _scale([p.cost for p in points]), _scale(_speeds(points))
    grid = [[" "] * width for _ in range(height)]

    def cell(point: Point) -> tuple[int, int]:
        row = height - 1 - round(up.share(point.speed) * (height - 1))
        return row, round(across.share(point.cost) * (width - 1))

    front = front_of(points)
    for index, point in enumerate(points):
        row, column = cell(point)
        if index not in front:
            grid[row][column] = "·"
    for mark, index in zip(_MARKS, front, strict=False):
        row, column = cell(points[index])
        grid[row][column] = mark
    names = {round(up.share(t) * (height - 1)): _tick(t, False) for t in up.ticks()}
    lines = [f"{axes.speed} (up) against {axes.cost} (right)"]
    for row, cells in enumerate(grid):
        name = names.get(height - 1 - row, "")
        lines.append(f"{name:>7} |{''.join(cells)}".rstrip())
    low, high = _tick(across.low, axes.money), _tick(across.high, axes.money)
    lines.append(f"{'':>7} +{'-' * width}")
    lines.append(f"{'':>9}{low}{high:>{width - len(low)}}")
    lines += [f"  {m}  {points[i].label}" for m, i in zip(_MARKS, front, strict=False)]
    return "\n".join(lines)


def _speeds(points: Sequence[Point]) -> list[float]:
    return [value for p in points for value in (p.speed_low, p.speed_high)]


def _scale(values: Sequence[float]) -> _Scale:
    """From 0 to a round number that holds every value, in four to eight steps."""
    most = max(values, default=1.0) or 1.0
    rough = most / 6
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return _Scale(0.0, step * math.ceil(most / step - 1e-9), step)


def _tick(value: float, money: bool) -> str:
    shown = f"{value / 1000:,.4g}k" if money and value >= 10_000 else f"{value:,.4g}"
    return f"${shown}" if money else shown
