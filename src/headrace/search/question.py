"""What is asked: which requests, how many a second, how fast, for how much at most.

Plain values, sent to every process of a search. Knows no candidates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.search.demand import Lengths
from headrace.workload.slo import Slo
from headrace.workload.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    workload: Workload
    lengths: Lengths  # of a sample of it
    rate: float  # requests/s of the whole fleet
    slo: Slo
    seed: int = 0
    most_usd_month: float = math.inf
    keep: int = 6  # deployments in the ranking
