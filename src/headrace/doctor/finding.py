"""A finding: symptom, evidence, cause, fix, predicted gain, confidence, and what would change it.

Plain values, as JSON has them too. Rules make them, report.py shows them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from headrace.doctor.observation import Observation


class Kind(StrEnum):
    FAULT = "fault"  # something is wrong, and changing it helps
    LIMIT = "limit"  # the endpoint is at the end of what it has
    COUNTER = "counter"  # a number that is not to be trusted
    EXPECTED = "expected"  # looks like a fault and is none


class Confidence(StrEnum):
    HIGH = "high"  # measured, or told by the engine itself
    MEDIUM = "medium"  # fits the numbers, and something else could explain them
    LOW = "low"  # a setting that is known to do this, without a measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """`low` to `high` times as good; `of` says what. Without numbers: `basis` says why not."""

    of: str
    low: float | None
    high: float | None
    basis: str

    @property
    def middle(self) -> float | None:
        """The one number of the band, where one is wanted."""
        return None if self.low is None or self.high is None else math.sqrt(self.low * self.high)

    @property
    def shown(self) -> str:
        if self.low is None or self.high is None:
            return f"not predicted: {self.basis}"
        low, high = f"{self.low:.3g}", f"{self.high:.3g}"
        band = low if low == high else f"{low} to {high}"
        return f"{self.of} × {band} ({self.basis})"


def no_gain(basis: str) -> Gain:
    return Gain(of="", low=None, high=None, basis=basis)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    rule: int  # the row of the table in docs/doctor.md
    kind: Kind
    symptom: str
    evidence: tuple[str, ...]
    cause: str
    fix: tuple[str, ...]
    gain: Gain
    confidence: Confidence
    unless: str  # what would change the verdict


Rule = Callable[[Observation], Finding | None]
