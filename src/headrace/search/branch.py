"""Which shapes are worth simulating, and how many replicas each needs: branch and bound.

A shape (a model on a kind of GPU, with a parallelism and types) is never cheaper than its bound
says, so shapes are tried from the lowest bound up, and the search ends when the next bound is
above what was found. Variants of a shape differ in settings that cost nothing (most sequences,
tokens a step); they are tried until one holds. Trials run in waves whose make-up depends on
results alone, never on time, so the answer is the same on any machine and with any number of
processes. Knows no GPU and no simulator: a trial is a function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

WAVE = 4  # trials at once; fixed, so that the number of processes changes nothing


class Outcome(Protocol):
    @property
    def holds(self) -> bool: ...


V = TypeVar("V")
T = TypeVar("T", bound=Outcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape(Generic[V]):
    """What is rented, and the settings to try on it, the most promising first."""

    name: str
    variants: tuple[V, ...]
    bounds: tuple[float, ...]  # requests/s that a replica of each variant never exceeds
    replica_cost: float
    estimate: float = 0.0  # requests/s of a replica, only to order shapes of equal cost

    @property
    def bound(self) -> float:
        return max(self.bounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized(Generic[V, T]):
    """A shape with the fewest replicas that hold the rate, and what showed it."""

    shape: Shape[V]
    variant: V
    replicas: int
    outcome: T

    @property
    def cost(self) -> float:
        return self.replicas * self.shape.replica_cost


@dataclass(slots=True)
class _Open(Generic[V, T]):
    """A shape whose count is not settled: above `fails`, at most `holds`."""

    shape: Shape[V]
    fails: int  # so many replicas are too few, by the bound or by trial
    asks: int  # the count that is tried now
    next_variant: int = 0
    best: Sized[V, T] | None = None  # holds, but a smaller count may too
    last: T | None = None
    trials: int = 0

    @property
    def least_cost(self) -> float:
        return (self.fails + 1) * self.shape.replica_cost


@dataclass(slots=True)
class Found(Generic[V, T]):
    """The state of a search: read at any time, also after an interrupt."""

    sized: list[Sized[V, T]] = field(default_factory=list)
    open: list[_Open[V, T]] = field(default_factory=list)
    given_up: list[tuple[Shape[V], T | None]] = field(default_factory=list)
    trials: int = 0

    def ranked(self) -> list[Sized[V, T]]:
        return sorted(self.sized, key=lambda s: (s.cost, -s.shape.bound * s.replicas, s.shape.name))

    def beaten(self) -> list[tuple[Shape[V], float]]:
        """Shapes that were not settled, with the least that they would cost."""
        return [(each.shape, each.least_cost) for each in self.open]


Job = tuple[V, float]  # a variant and the rate of one replica
Run = Callable[[Sequence[Job[V]]], Sequence[T]]


def least_replicas(rate: float, bound: float) -> int:
    return max(1, math.ceil(rate / bound - 1e-9))


def branch_and_bound(
    shapes: Sequence[Shape[V]],
    rate: float,
    run: Run[V, T],
    *,
    keep: int,
    most_cost: float = math.inf,
    most_tries: int = 12,
) -> Iterator[Found[V, T]]:
    """Yields its state after each wave; the last one is the answer. The `keep` cheapest shapes are
    settled, exactly. A shape that fails at `most_tries` counts is given up with its last outcome,
    and so is one whose least cost is above `most_cost`."""
    found: Found[V, T] = Found()
    for shape in shapes:
        least = least_replicas(rate, shape.bound)
        found.open.append(_Open(shape, least - 1, least))
    while wave := _wave(found, keep, most_cost):
        jobs = [(_variant(each, rate), rate / each.asks) for each in wave]
        outcomes = run(jobs)
        found.trials += len(jobs)
        for each, outcome in zip(wave, outcomes, strict=True):
            _learn(found, each, outcome, rate, most_tries)
        yield found
    for each in [each for each in found.open if each.best is not None]:
        assert each.best is not None
        found.open.remove(each)  # holds; a smaller count was not worth finding
        found.sized.append(each.best)
    yield found


def _wave(found: Found[V, T], keep: int, most_cost: float) -> list[_Open[V, T]]:
    """The cheapest shapes that could still be among the `keep` cheapest."""
    costs = sorted(sized.cost for sized in found.sized)
    worst = costs[keep - 1] if len(costs) >= keep else math.inf
    ready = [o for o in found.open if o.least_cost < worst and o.least_cost <= most_cost]
    ready.sort(key=lambda o: (o.least_cost, -o.shape.estimate * o.asks, o.shape.name))
    return ready[:WAVE]


def _variant(each: _Open[V, T], rate: float) -> V:
    """The next variant whose bound allows the rate; there is one, or the count would be higher."""
    return each.shape.variants[_skip(each, rate)]


def _skip(each: _Open[V, T], rate: float) -> int:
    number = each.next_variant
    while number < len(each.shape.variants) and each.shape.bounds[number] * each.asks < rate * (
        1 - 1e-9
    ):
        number += 1
    return number


def _learn(found: Found[V, T], each: _Open[V, T], outcome: T, rate: float, most_tries: int) -> None:
    number = _skip(each, rate)
    each.last, each.trials = outcome, each.trials + 1
    if outcome.holds:
        variant = each.shape.variants[number]
        each.best = Sized(shape=each.shape, variant=variant, replicas=each.asks, outcome=outcome)
        each.next_variant = 0
    else:
        each.next_variant = number + 1
        if _skip(each, rate) < len(each.shape.variants):
            return  # another variant may hold at this count
        each.fails, each.next_variant = each.asks, 0
    _next_count(found, each, most_tries)


def _next_count(found: Found[V, T], each: _Open[V, T], most_tries: int) -> None:
    if each.best is not None and each.best.replicas == each.fails + 1:
        found.open.remove(each)
        found.sized.append(each.best)
    elif each.best is not None:
        each.asks = (each.fails + each.best.replicas) // 2
    elif each.trials >= most_tries * len(each.shape.variants):
        found.open.remove(each)
        found.given_up.append((each.shape, each.last))
    else:  # larger counts in growing steps: a fleet of fifty is not tried one by one
        each.asks = each.fails + max(1, each.fails // 6)
