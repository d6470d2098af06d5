"""What a search found: ranked deployments with bands, and why all others lost.

Plain values that become a table, a picture or JSON. Decides nothing: planner.py fills it in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from headrace.search.candidate import Candidate
from headrace.search.cost import HOURS_A_MONTH
from headrace.search.trial import Trial


class Why(StrEnum):
    """Kinds of reasons to lose, from the first that is looked at to the last."""

    TYPE = "can't be computed there"
    DIVIDES = "does not divide"
    MEMORY = "does not fit"
    TTFT = "the first token is too late even alone"
    TPOT = "tokens are too slow even alone"
    RATE = "no rate is held"
    BUDGET = "above the budget"
    COST = "costs more"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A candidate that is not in the ranking. `least` is the figure that made it lose, for finding
    the one that came nearest."""

    candidate: Candidate
    why: Why
    text: str  # with its numbers
    least: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Between the fast and the slow end of what the cost model is known to be wrong by."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A deployment that holds the rate under the objective, even at the slow end of the band."""

    candidate: Candidate
    replicas: int
    usd_per_gpu_hour: float | None  # None: no price is known
    measured: bool  # the engine's step times, on GPUs of this kind
    requests_s: float  # that the fleet is asked for
    tokens_per_request: float  # prompt and answer
    ttft_p50_s: Band
    ttft_p99_s: Band
    tpot_p50_s: Band
    tpot_p99_s: Band
    # The objective is held at the first rate at the slow end, and no longer at the second one even
    # at the fast end; both of the whole fleet. None: not looked for.
    holds_to: tuple[float, float] | None
    trials: tuple[Trial, ...]  # what all this was taken from; the first one decided the count

    @property
    def gpus(self) -> int:
        return self.replicas * self.candidate.tp

    @property
    def gpu_hours_month(self) -> float:
        return self.gpus * HOURS_A_MONTH

    @property
    def usd_month(self) -> float | None:
        if self.usd_per_gpu_hour is None:
            return None
        return self.gpu_hours_month * self.usd_per_gpu_hour

    @property
    def usd_million(self) -> float | None:
        """For a million tokens, prompt and answer alike, if the rate is there all month."""
        if self.usd_per_gpu_hour is None:
            return None
        tokens_hour = self.requests_s * self.tokens_per_request * 3600
        return self.gpus * self.usd_per_gpu_hour / tokens_hour * 1e6

    @property
    def cost(self) -> tuple[int, float]:
        """To rank by: money where it is known; GPUs without a price come last, by their number."""
        return (1, float(self.gpus)) if self.usd_month is None else (0, self.usd_month)

    @property
    def label(self) -> str:
        inner = self.candidate.cards
        whole = inner if self.replicas == 1 else f"{self.replicas} x ({inner})"
        return whole if self.measured else f"{whole} *"

    def facts(self) -> dict[str, Any]:
        return {
            "deployment": self.candidate.facts(),
            "replicas": self.replicas,
            "measured": self.measured,
            "gpus": self.gpus,
            "gpu_hours_month": self.gpu_hours_month,
            "usd_per_gpu_hour": self.usd_per_gpu_hour,
            "usd_month": self.usd_month,
            "usd_million_tokens": self.usd_million,
            "ttft_p50_s": asdict(self.ttft_p50_s),
            "ttft_p99_s": asdict(self.ttft_p99_s),
            "tpot_p50_s": asdict(self.tpot_p50_s),
            "tpot_p99_s": asdict(self.tpot_p99_s),
            "holds_requests_s": None if self.holds_to is None else list(self.holds_to),
            "trials": [trial.facts() for trial in self.trials],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LossGroup:
    """Losses of a kind together, with the one that came nearest."""

    why: Why
    count: int
    nearest: Loss

    def facts(self) -> dict[str, Any]:
        return {
            "why": str(self.why),
            "candidates": self.count,
            "nearest": {"deployment": self.nearest.candidate.facts(), "text": self.nearest.text},
        }


def grouped(losses: Sequence[Loss]) -> list[LossGroup]:
    found: dict[Why, list[Loss]] = {why: [] for why in Why}
    for loss in losses:
        found[loss.why].append(loss)
    groups = []
    for why, group in found.items():
        if group:
            nearest = min(group, key=lambda loss: (loss.least, loss.text))
            groups.append(LossGroup(why=why, count=len(group), nearest=nearest))
    return groups


@dataclass(slots=True, kw_only=True)
class Tally:
    """How much was looked at."""

    candidates: int = 0
    simulated: int = 0  # candidates
    runs: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    rows: tuple[Row, ...]
    losses: tuple[Loss, ...]
    tally: Tally
    complete: bool  # not interrupted
    fleet: Trial | None = None  # the first row, all its replicas behind a router
    notes: tuple[str, ...] = field(default=())
