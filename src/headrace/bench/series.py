"""A run over its time, for pictures: rates and numbers in equal slices, and distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from headrace.bench.summary import Summary

Points = list[tuple[float, float]]


def token_rates(summary: Summary, slices: int = 60) -> Points:
    """(Middle of the slice, output tokens a second)."""
    if not summary.wall_s:
        return []
    start_s = min(one.scheduled_s for one in summary.records)
    width = summary.wall_s / slices
    counts = [0.0] * slices
    for one in summary.good:
        times = one.answer.times_s
        for at_s in times:
            counts[min(slices - 1, int((at_s - start_s) / width))] += one.tokens / len(times)
    return [((place + 0.5) * width, count / width) for place, count in enumerate(counts)]


def at_once(summary: Summary) -> Points:
    """(When, requests that were sent and had not ended): a step at each change."""
    changes: list[tuple[float, int]] = []
    for one in summary.records:
        if one.sent_s is not None:
            changes += [(one.sent_s, 1), (max(one.end_s, one.sent_s), -1)]
    found, now = [], 0
    for at_s, change in sorted(changes, key=lambda each: (each[0], each[1])):
        now += change
        found.append((at_s, float(now)))
    return found


def slice_means(steps: Points, slices: int = 240) -> Points:
    """Steps as they are, or where they are too many to see, (beginning, mean over time) of equal
    slices: a client that sends again within a millisecond would else be painted as a bar."""
    if len(steps) <= 2 * slices:
        return steps
    found = time_means(steps, slices)
    return [*found, steps[-1]] if found else steps


def time_means(steps: Points, slices: int) -> Points:
    """(Beginning, mean over time) of equal slices: a level lasts until the next step."""
    start_s, end_s = (steps[0][0], steps[-1][0]) if steps else (0.0, 0.0)
    width = (end_s - start_s) / slices
    if width <= 0:
        return []
    areas = [0.0] * slices
    for (at_s, level), (until_s, _) in pairwise(steps):
        while at_s < until_s:
            place = min(slices - 1, int((at_s - start_s) / width))
            next_s = until_s if place == slices - 1 else start_s + (place + 1) * width
            next_s = max(min(until_s, next_s), math.nextafter(at_s, math.inf))
            areas[place] += level * (next_s - at_s)
            at_s = next_s
    return [(start_s + place * width, area / width) for place, area in enumerate(areas)]


def first_tokens(summary: Summary) -> Points:
    """(Scheduled time, TTFT) of each whole answer."""
    return [(one.scheduled_s, one.ttft_s) for one in summary.good]


def cumulative(values: Sequence[float], most: int = 400) -> Points:
    """(Value, share of values up to it), at most so many points."""
    ordered = sorted(values)
    step = max(1, len(ordered) // most)
    places = [*range(0, len(ordered), step), len(ordered) - 1] if ordered else []
    return [(ordered[place], (place + 1) / len(ordered)) for place in places]


def binned(points: Points, bins: int) -> list[float | None]:
    """Means of equal slices of x, None where nothing is."""
    if not points:
        return []
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    width = (high - low) / bins or 1.0
    found: list[list[float]] = [[] for _ in range(bins)]
    for x, y in points:
        found[min(bins - 1, int((x - low) / width))].append(y)
    return [sum(values) / len(values) if values else None for values in found]
