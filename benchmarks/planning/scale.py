"""Routing at scale, on paper: a thousand replicas and a million requests on a virtual clock.

    python benchmarks/planning/scale.py check [--replicas 4 8 16]   # coarse beside whole engines
    python benchmarks/planning/scale.py run [--replicas 1000] [--requests 1000000] [--seeds 3]

`check` serves the same requests with simulate/fleet.py, whose replicas are the engine with its
scheduler, queue and prefix cache, and with simulate/coarse_fleet.py, and shows both. `run` is the
coarse one alone. Routers are those of `headrace route`. The machine is an 8B model on a GPU of 80
GB, about: 8 ms a step, 20 us a token, 40,000 tokens of KV unless told.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from headrace.core.config import SchedulerConfig
from headrace.core.step import RunnerLimits
from headrace.policies.routing import Routing
from headrace.simulate.coarse import Machine
from headrace.simulate.coarse_fleet import serve_coarsely
from headrace.simulate.cost import linear_cost
from headrace.simulate.fleet import FleetSetup, serve_fleet
from headrace.simulate.replica import UNBOUNDED, Setup
from headrace.simulate.report import quantile
from headrace.workload.ask import Ask

MACHINE = Machine(base_s=0.008, token_s=2e-5, context_s=1e-8, kv_tokens=40_000)
ROUTINGS = (Routing.ROUND_ROBIN, Routing.LEAST_PENDING, Routing.PREFIX)


@dataclass(frozen=True)
class Load:
    """Prompts are a system prompt, a document by Zipf's law, and a question."""

    system: int  # tokens
    document: int
    question: int  # mean; exponential
    output: int  # mean; exponential
    documents: int = 0  # for each replica
    rate: float = 6.0  # requests a second for each replica


LOADS = {
    "documents": Load(system=500, document=2000, question=200, output=150, documents=25, rate=8.0),
    "one system prompt": Load(system=1000, document=0, question=600, output=150, rate=7.0),
    "nothing shared": Load(system=0, document=0, question=1500, output=150, rate=6.0),
}


def asks(load: Load, replicas: int, requests: int, seed: int) -> Iterator[Ask]:
    chance, at_s = Random(f"{seed} {load}"), 0.0
    kinds = load.documents * replicas
    shared_by: list[tuple[tuple[str, int], ...]] = [
        (("system", load.system), (f"document {kind}", load.document)) for kind in range(kinds)
    ]
    if not kinds:
        shared_by = [(("system", load.system),) if load.system else ()]
    # Zipf's law with an exponent of 0.8, by inversion.
    weights, total = [], 0.0
    for kind in range(len(shared_by)):
        total += (kind + 1) ** -0.8
        weights.append(total)
    for _ in range(requests):
        at_s += chance.expovariate(load.rate * replicas)
        (shared,) = chance.choices(shared_by, cum_weights=weights)
        own = 1 + int(chance.expovariate(1 / load.question))
        yield Ask(
            at_s=at_s,
            prompt_tokens=sum(tokens for _, tokens in shared) + own,
            output_tokens=1 + int(chance.expovariate(1 / load.output)),
            shared=shared,
        )


@dataclass(frozen=True)
class Row:
    hits: float
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_mean_s: float
    e2e_mean_s: float
    tokens_s: float
    took_s: float

    @property
    def text(self) -> str:
        return (
            f"cached {self.hits:6.1%}  TTFT p50 {1e3 * self.ttft_p50_s:6.0f} p95 "
            f"{1e3 * self.ttft_p95_s:6.0f} mean {1e3 * self.ttft_mean_s:6.0f} ms  "
            f"e2e {self.e2e_mean_s:6.3f} s  {self.tokens_s:,.0f} tokens/s"
        )


def coarse(load: Load, replicas: int, requests: int, routing: Routing, seed: int) -> Row:
    began_s = time.thread_time()
    found = serve_coarsely(asks(load, replicas, requests, seed), MACHINE, replicas, routing, seed)
    return _row(
        found.cached_share,
        found.ttft_s,
        found.e2e_s,
        found.output_tokens / found.end_s,
        time.thread_time() - began_s,
    )


def whole(load: Load, replicas: int, requests: int, routing: Routing, seed: int) -> Row:
    began_s = time.thread_time()
    limits = RunnerLimits(
        max_batch_tokens=MACHINE.max_batch_tokens,
        max_sequences=MACHINE.max_sequences,
        total_blocks=MACHINE.kv_tokens // MACHINE.block_tokens,
        block_tokens=MACHINE.block_tokens,
        context_tokens=32768,
        steps_in_flight=1,
    )
    cost = linear_cost(MACHINE.base_s, MACHINE.token_s, MACHINE.context_s)
    config = SchedulerConfig(max_step_growth=24)  # what it is on a GPU
    setup = Setup(limits=limits, cost=cost, config=config, queue=UNBOUNDED)
    fleet = FleetSetup(setup=setup, replicas=replicas, routing=routing, seed=seed)
    found = serve_fleet(asks(load, replicas, requests, seed), fleet)
    end_s = max(each.end_s or 0.0 for each in found.served)
    return _row(
        found.cached_share,
        [each.ttft_s for each in found.served],
        [each.e2e_s for each in found.served],
        sum(each.tokens for each in found.served) / end_s,
        time.thread_time() - began_s,
    )


def _row(
    hits: float, ttft_s: Sequence[float], e2e_s: Sequence[float], tokens_s: float, took_s: float
) -> Row:
    ordered = sorted(ttft_s)
    p50, p95 = quantile(ordered, 0.5), quantile(ordered, 0.95)
    return Row(hits, p50, p95, statistics.fmean(ordered), statistics.fmean(e2e_s), tokens_s, took_s)


def check(sizes: list[int], requests: int, names: list[str]) -> None:
    for name in names:
        for replicas in sizes:
            for routing in ROUTINGS:
                one = whole(LOADS[name], replicas, requests * replicas, routing, 1)
                two = coarse(LOADS[name], replicas, requests * replicas, routing, 1)
                print(f"{name}, {replicas} replicas, {routing}")
                print(f"  engines {one.text}  ({one.took_s:.1f} s)")
                print(f"  coarse  {two.text}  ({two.took_s:.1f} s)", flush=True)


def run(replicas: int, requests: int, seeds: list[int], names: list[str], only: list[str]) -> None:
    for name in names:
        for routing in [Routing(each) for each in only] or ROUTINGS:
            rows = [coarse(LOADS[name], replicas, requests, routing, seed) for seed in seeds]
            memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(f"{name}, {replicas} replicas, {requests:,} requests, {routing}")
            for seed, row in zip(seeds, rows, strict=True):
                print(f"  seed {seed}: {row.text}  ({row.took_s:.0f} s; {memory_mb:.0f} MB)")
            print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("check", "run"))
    parser.add_argument("--replicas", type=int, nargs="+", help="several with check")
    parser.add_argument("--requests", type=int, help="in all; with check for each replica")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=list(LOADS))
    parser.add_argument("--policies", nargs="+", default=[])
    asked = parser.parse_args()
    if asked.what == "check":
        check(asked.replicas or [4, 8, 16], asked.requests or 250, asked.loads)
    else:
        replicas = (asked.replicas or [1000])[0]
        run(replicas, asked.requests or 1_000_000, asked.seeds, asked.loads, asked.policies)


if __name__ == "__main__":
    main()
