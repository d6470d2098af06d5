"""The weights of policies/routing.py, on simulated fleets: docs/decisions/0023 has what was found.

    python benchmarks/planning/routing_weights.py [--miss 1 2 3] [--answer 1 2 4] [--cached 0 0.1 1]

Coarse replicas (simulate/coarse.py) with different prompts in common; the policy `prefix` with each
choice of weights, beside `least-pending`. Shown are the cached share of prompt tokens, and mean and
95th percentile of TTFT as ratios to `least-pending`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pool
from random import Random

from headrace.policies import routing
from headrace.policies.routing import Routing, cheapest
from headrace.simulate.coarse import Machine
from headrace.simulate.coarse_fleet import serve_coarsely
from headrace.simulate.report import quantile
from headrace.workload.ask import Ask

GPU = Machine(base_s=0.008, token_s=2e-5, context_s=1e-8, kv_tokens=40_000)  # an 8B model, about
# The default model on half of a core, with room for five prompts.
SLOW = Machine(
    base_s=0.010, token_s=1.6e-3, max_batch_tokens=512, kv_tokens=3072, max_step_growth=2.0
)
Shared = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Load:
    machine: Machine
    replicas: int
    rate: float  # requests a second of all
    shared: tuple[Shared, ...]  # by Zipf's law with an exponent of 0.8
    own: int  # tokens of a prompt that nobody shares; mean, exponential
    output: int  # likewise
    requests: int = 6000

    def asks(self, seed: int) -> Iterator[Ask]:
        chance, at_s = Random(seed), 0.0
        weights = list(itertools.accumulate((n + 1) ** -0.8 for n in range(len(self.shared))))
        for _ in range(self.requests):
            at_s += chance.expovariate(self.rate)
            (shared,) = chance.choices(self.shared, cum_weights=weights)
            own = 1 + int(chance.expovariate(1 / self.own))
            yield Ask(
                at_s=at_s,
                prompt_tokens=sum(tokens for _, tokens in shared) + own,
                output_tokens=1 + int(chance.expovariate(1 / self.output)),
                shared=shared,
            )


def documents(count: int, tokens: int, system: int = 0) -> tuple[Shared, ...]:
    before: Shared = (("system", system),) if system else ()
    return tuple((*before, (f"document {number}", tokens)) for number in range(count))


LOADS = {
    "25 documents each": Load(GPU, 8, 64.0, documents(200, 2000, 500), 200, 150),
    "the same, calm": Load(GPU, 8, 40.0, documents(200, 2000, 500), 200, 150),
    "5 documents each": Load(GPU, 8, 72.0, documents(40, 2000, 500), 200, 150),
    "one prompt for all": Load(GPU, 8, 64.0, documents(1, 2000), 200, 150),
    "a system prompt": Load(GPU, 8, 56.0, documents(1, 1000), 600, 150),
    "a quarter shared": Load(GPU, 8, 44.0, documents(320, 400), 1200, 150),
    "16 on 4 slow ones": Load(SLOW, 4, 6.0, documents(16, 560), 10, 4, requests=1500),
    "the same, busy": Load(SLOW, 4, 9.0, documents(16, 560), 10, 4, requests=1500),
}


@dataclass(frozen=True)
class Weights:
    miss: float = routing.MISS
    answer: int = routing.ANSWER
    cached: float = routing.CACHED

    def apply(self) -> None:
        """In this process."""
        set_weight: Callable[[str, object], None] = partial(setattr, routing)
        set_weight("ANSWER", self.answer)
        set_weight("CACHED", self.cached)
        set_weight("cheapest", partial(cheapest, miss=self.miss))


@dataclass(frozen=True)
class Task:
    load: str
    policy: Routing
    weights: Weights
    seed: int


def work(task: Task) -> tuple[float, float, float]:
    """The cached share, and mean and 95th percentile of TTFT."""
    task.weights.apply()
    load = LOADS[task.load]
    asks = load.asks(task.seed)
    found = serve_coarsely(asks, load.machine, load.replicas, task.policy, task.seed)
    ttft_s = sorted(found.ttft_s)
    return found.cached_share, statistics.fmean(ttft_s), quantile(ttft_s, 0.95)


def means(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    hits, mean_s, p95_s = (statistics.fmean(values) for values in zip(*rows, strict=True))
    return hits, mean_s, p95_s


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--miss", type=float, nargs="+", default=[1, 1.5, 2, 3, 4])
    parser.add_argument("--answer", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--cached", type=float, nargs="+", default=[0, 0.1, 1])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    grid = [
        Weights(miss, answer, cached)
        for cached, miss, answer in itertools.product(asked.cached, asked.miss, asked.answer)
    ]
    ways = [(Routing.LEAST_PENDING, Weights()), *((Routing.PREFIX, each) for each in grid)]
    cells = [(load, *way) for load in LOADS for way in ways]
    tasks = [Task(*cell, seed) for cell in cells for seed in asked.seeds]
    with Pool(asked.processes) as pool:
        rows = iter(pool.map(work, tasks, chunksize=4))
    found = {cell: means([next(rows) for _ in asked.seeds]) for cell in cells}
    for load in LOADS:
        _, base_s, base_p95_s = found[load, *ways[0]]
        print(f"{load}; least-pending: TTFT mean {base_s * 1e3:.0f}, p95 {base_p95_s * 1e3:.0f} ms")
        for weights in grid:
            hits, mean_s, p95_s = found[load, Routing.PREFIX, weights]
            print(
                f"  miss {weights.miss:<3g} answer {weights.answer} cached {weights.cached:<4g}"
                f"  {hits:6.1%} cached, TTFT mean {mean_s / base_s:.3f}, "
                f"p95 {p95_s / base_p95_s:.3f}"
            )


if __name__ == "__main__":
    main()
