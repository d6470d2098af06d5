"""What the search must know of a replica, and who can say it: a builder.

A builder turns a candidate into a replica's setup and step times, or says why that can't be. The
real one is machine.py's, over the ledger and the roofline; tests have small ones. Knows neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.search.answer import Loss
from headrace.search.candidate import Candidate
from headrace.search.steady import StepTime
from headrace.simulate.replica import Setup


class Recipe(Protocol):
    """Makes a replica's setup. Survives being sent to another process, which a setup may not."""

    def setup(self) -> Setup: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    recipe: Recipe
    step_s: StepTime  # of a batch, the same step times as the setup's
    kv_tokens: int  # that the pool holds
    alone_ttft_s: float  # of the prompt that the objective must hold for, on an idle replica
    alone_tpot_s: float  # of one sequence on an idle replica
    spreads_prompts: bool  # over several steps, even if one had room for them


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBand:
    """Real step times lie between these multiples of the cost model's; first tokens are further
    off than steps, by these factors more at either end."""

    fast: float
    slow: float
    first_fast: float = 1.0
    first_slow: float = 1.0
    source: str  # where it comes from, for a person
    measured: bool = True  # on GPUs of this kind
    whose: str | None = None  # step times, if not the planned engine's

    def first(self, slowness: float) -> float:
        """The factor of first tokens at one end, or 1 in the middle."""
        return {self.slow: self.first_slow, self.fast: self.first_fast}.get(slowness, 1.0)


class Builder(Protocol):
    """Stays in the first process; recipes go to the others."""

    def candidates(self) -> Sequence[Candidate]:
        """All that could be rented, in a fixed order, the possible and the impossible."""
        ...

    def refuse(self, candidate: Candidate) -> Loss | None:
        """Why a candidate can't be: types, divisions, memory, and floors of its times."""
        ...

    def build(self, candidate: Candidate, slowness: float) -> Built:
        """Only for a candidate that is not refused."""
        ...

    def band(self, candidate: Candidate) -> ErrorBand: ...

    def plain_precision(self, model: str) -> str:
        """What the model's checkpoint is in."""
        ...

    def plain_kv_dtype(self, model: str) -> str: ...

    def usd_per_gpu_hour(self, candidate: Candidate) -> float | None: ...
