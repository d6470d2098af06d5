"""Charts as SVG text: axes with round numbers, lines, dots and bands. Knows no benchmark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT = 560, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 14, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """`style`: line, steps, dots or area; `tone` 0 to 3 picks a colour of the page."""

    name: str
    points: Points
    style: str = "line"
    tone: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A part of the x axis that is marked."""

    low: float
    high: float
    name: str


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers within the range."""
    if high <= low:
        return [low]
    rough = (high - low) / wanted
    base = 10 ** math.floor(math.log10(rough))
    step = next(base * each for each in (1, 2, 5, 10) if base * each >= rough)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def chart(
    title: str, x_name: str, y_name: str, series: Sequence[Series], bands: Sequence[Band] = ()
) -> str:
    """Empty series are left out; without any, a sentence instead."""
    series = [one for one in series if one.points]
    if not series:
        return f"<figure><figcaption>{escape(title)}</figcaption><p>No data.</p></figure>"
    xs = [x for one in series for x, _ in one.points] + [
        edge for band in bands for edge in (band.low, band.high)
    ]
    ys = [y for one in series for _, y in one.points]
    frame = _Frame(min(xs), max(xs), 0.0 if min(ys) >= 0 else min(ys), max(ys) * 1.05 or 1.0)
    parts = [frame.axes(x_name, y_name)]
    parts += [frame.band(band) for band in bands]
    parts += [frame.draw(one) for one in series]
    legend = ""
    if len(series) > 1:
        items = "".join(f'<li class="tone{one.tone}">{escape(one.name)}</li>' for one in series)
        legend = f"<ul>{items}</ul>"
    label = escape(f"{title}: {y_name} over {x_name}", quote=True)
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>{legend}"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg></figure>"
    )


@dataclass(frozen=True, slots=True)
class _Frame:
    """Values to places on the picture."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        span = self.x_high - self.x_low or 1.0
        return _LEFT + (value - self.x_low) / span * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        span = self.y_high - self.y_low or 1.0
        return HEIGHT - _BOTTOM - (value - self.y_low) / span * (HEIGHT - _TOP - _BOTTOM)

    def axes(self, x_name: str, y_name: str) -> str:
        floor = HEIGHT - _BOTTOM
        parts = []
        for value in ticks(self.y_low, self.y_high, 4):
            at = self.y(value)
            parts.append(
                f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" '
                f'y2="{at:.1f}"/><text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">'
                f"{_shown(value)}</text>"
            )
        for value in ticks(self.x_low, self.x_high):
            parts.append(
                f'<text x="{self.x(value):.1f}" y="{floor + 16}" text-anchor="middle">'
                f"{_shown(value)}</text>"
            )
        middle = (_LEFT + WIDTH - _RIGHT) / 2
        parts.append(
            f'<text class="name" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">'
            f"{escape(x_name)}</text>"
        )
        parts.append(
            f'<text class="name" x="12" y="{(_TOP + floor) / 2}" text-anchor="middle" '
            f'transform="rotate(-90 12 {(_TOP + floor) / 2})">{escape(y_name)}</text>'
        )
        return "".join(parts)

    def band(self, band: Band) -> str:
        left, right = self.x(band.low), self.x(band.high)
        return (
            f'<rect class="band" x="{left:.1f}" y="{_TOP}" width="{max(1.0, right - left):.1f}" '
            f'height="{HEIGHT - _TOP - _BOTTOM}"><title>{escape(band.name)}</title></rect>'
        )

    def draw(self, one: Series) -> str:
        places = [(self.x(x), self.y(y)) for x, y in one.points]
        if one.style == "dots":
            dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2"/>' for x, y in places)
            return f'<g class="dots tone{one.tone}">{dots}</g>'
        if one.style == "steps":
            places = [
                place
                for before, after in pairwise(places)
                for place in (before, (after[0], before[1]))
            ] + places[-1:]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        shape = f'<path class="line tone{one.tone}" d="{path}"/>'
        if one.style == "area":
            floor = self.y(max(0.0, self.y_low))
            closed = f"{path}L{places[-1][0]:.1f} {floor:.1f}L{places[0][0]:.1f} {floor:.1f}Z"
            shape = f'<path class="area tone{one.tone}" d="{closed}"/>' + shape
        return shape


def _shown(value: float) -> str:
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if abs(value) >= 1e4 else f"{value:g}"
