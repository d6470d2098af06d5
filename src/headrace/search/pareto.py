"""The Pareto front of cost against speed: what nothing else beats in both.

Knows points with two numbers and a label; not what was simulated to get them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A deployment in the picture. Speed is what one user sees, with the band it lies in."""

    label: str
    group: str  # points of a group share a colour: the GPU's name
    cost: float  # a month, or GPUs where there is no price; lower is better
    speed: float  # higher is better
    speed_low: float
    speed_high: float


def front_of(points: Sequence[Point]) -> list[int]:
    """Indices of the points that no other point beats, from the cheapest to the fastest. Of points
    that are equal in both, the first."""
    order = sorted(range(len(points)), key=lambda i: (points[i].cost, -points[i].speed, i))
    front: list[int] = []
    for index in order:
        if not front or points[index].speed > points[front[-1]].speed:
            front.append(index)
    return front
