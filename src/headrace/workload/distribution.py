"""Distributions of a number: a length in tokens, a wait in seconds. Standard library only.

`draw` takes its randomness from the caller, so that a seed decides everything. As people write
them: "512", "uniform:100,200", "normal:512,128", "lognormal:512,0.8" (mean, then standard deviation
divided by the mean), "exponential:3", "file:lengths.txt" (one number a line, drawn with equal
chances).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import NormalDist, fmean
from typing import Protocol

from headrace.core.checks import refusal
from headrace.core.errors import ConfigError, HeadraceError
from headrace.workload.lines import numbered_lines

_STANDARD = NormalDist()


class Distribution(Protocol):
    def draw(self, random: Random) -> float: ...

    def mean_between(self, least: float, most: float) -> float:
        """The mean of what is drawn, where what is outside is moved to the nearer bound."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    value: float

    def draw(self, random: Random) -> float:
        return self.value

    def mean_between(self, least: float, most: float) -> float:
        return min(max(self.value, least), most)


@dataclass(frozen=True, slots=True)
class Uniform:
    low: float
    high: float

    def draw(self, random: Random) -> float:
        return random.uniform(self.low, self.high)

    def mean_between(self, least: float, most: float) -> float:
        if self.high <= self.low:
            return min(max(self.low, least), most)
        low, high = (min(max(end, least), most) for end in (self.low, self.high))
        below = max(0.0, min(least, self.high) - self.low)
        above = max(0.0, self.high - max(most, self.low))
        inside = max(0.0, high - low)
        moved = below * least + above * most + inside * (low + high) / 2
        return moved / (self.high - self.low)


@dataclass(frozen=True, slots=True)
class Normal:
    mean: float
    deviation: float

    def draw(self, random: Random) -> float:
        return random.gauss(self.mean, self.deviation)

    def mean_between(self, least: float, most: float) -> float:
        if self.deviation == 0:
            return min(max(self.mean, least), most)
        a, b = (_standard(end, self.mean, self.deviation) for end in (least, most))
        inside = _cdf(b) - _cdf(a)
        middle = self.mean * inside + self.deviation * (_pdf(a) - _pdf(b))
        return _part(least, _cdf(a)) + middle + _part(most, 1 - _cdf(b))


@dataclass(frozen=True, slots=True)
class Lognormal:
    """By its mean and its coefficient of variation (standard deviation over mean)."""

    mean: float
    cv: float

    @property
    def _sigma(self) -> float:
        return math.sqrt(math.log1p(self.cv**2))

    @property
    def _mu(self) -> float:
        return math.log(self.mean) - self._sigma**2 / 2

    def draw(self, random: Random) -> float:
        return random.lognormvariate(self._mu, self._sigma)

    def mean_between(self, least: float, most: float) -> float:
        if self.cv == 0:
            return min(max(self.mean, least), most)
        mu, sigma = self._mu, self._sigma
        a = _standard(math.log(least), mu, sigma) if least > 0 else -math.inf
        b = _standard(math.log(most), mu, sigma) if most > 0 else -math.inf
        middle = self.mean * (_cdf(b - sigma) - _cdf(a - sigma))
        return _part(least, _cdf(a)) + middle + _part(most, 1 - _cdf(b))


@dataclass(frozen=True, slots=True)
class Exponential:
    mean: float

    def draw(self, random: Random) -> float:
        return random.expovariate(1 / self.mean) if self.mean else 0.0

    def mean_between(self, least: float, most: float) -> float:
        if not self.mean:
            return min(max(0.0, least), most)
        least = max(least, 0.0)
        most = max(most, least)
        return least + self.mean * (math.exp(-least / self.mean) - math.exp(-most / self.mean))


@dataclass(frozen=True, slots=True)
class Empirical:
    values: tuple[float, ...]

    def draw(self, random: Random) -> float:
        return self.values[random.randrange(len(self.values))]

    def mean_between(self, least: float, most: float) -> float:
        return fmean(min(max(value, least), most) for value in self.values)


def read_values(path: Path) -> Empirical:
    """One number a line; empty lines and lines that begin with # are left out."""
    values = []
    for number, line in numbered_lines(path):
        try:
            value = float(line)
        except ValueError:
            value = -1.0
        if not math.isfinite(value) or value < 0:
            raise ConfigError(
                f"{path}, line {number}: {line[:40]!r}; expected a number, 0 or more.",
                "Write one number a line.",
            )
        values.append(value)
    if not values:
        raise ConfigError(f"{path} has no numbers; expected one a line.", "Write at least one.")
    return Empirical(tuple(values))


_KINDS: dict[str, tuple[int, Callable[..., Distribution]]] = {
    "constant": (1, Constant),
    "uniform": (2, Uniform),
    "normal": (2, Normal),
    "lognormal": (2, Lognormal),
    "exponential": (1, Exponential),
}
EXPECTED = (
    "a number, or one of uniform:LOW,HIGH normal:MEAN,DEVIATION lognormal:MEAN,CV "
    "exponential:MEAN file:PATH"
)


def parse_distribution(text: str, param: str) -> Distribution:
    """As the head of this file writes them; `param` is the name for error messages."""
    word, _, rest = text.strip().partition(":")
    if not rest:
        word, rest = "constant", word
    if word == "file":
        return read_values(Path(rest))
    count, make = _KINDS.get(word, (0, Constant))
    try:
        numbers = [float(part) for part in rest.split(",")]
    except ValueError:
        raise _refused(param, text) from None
    if len(numbers) != count or not all(0 <= one < math.inf for one in numbers):
        raise _refused(param, text)
    if word == "uniform" and numbers[0] > numbers[1]:
        raise refusal(ConfigError, param, text, "the lower end first")
    if word == "lognormal" and not numbers[0]:
        raise refusal(ConfigError, param, text, "a mean above 0")
    return make(*numbers)


def _refused(param: str, text: str) -> HeadraceError:
    return refusal(ConfigError, param, text, EXPECTED)


def _standard(value: float, mean: float, deviation: float) -> float:
    return (value - mean) / deviation


def _cdf(value: float) -> float:
    return _STANDARD.cdf(value) if math.isfinite(value) else float(value > 0)


def _pdf(value: float) -> float:
    return _STANDARD.pdf(value) if math.isfinite(value) else 0.0


def _part(value: float, share: float) -> float:
    """Zero shares of an infinite bound are nothing."""
    return value * share if share > 0 else 0.0
