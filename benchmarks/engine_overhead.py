"""The engine's own Python cost of a step: schedule and commit, the runner's time excluded.

    python benchmarks/engine_overhead.py [--steps 600] [--rounds 5] [--tenants 1]

Decoding sequences only, of 64-token prompts, with the prefix cache on; target: 200 µs and 5 µs a
running sequence (2.8 GHz server core). CPU time of the engine's thread, so that other
processes don't count. Medians over all steps of a round; the median round and the range of rounds
are given, the mean, which has the garbage collector's share in it, and the best round's 10th
percentile, which changes least on a machine whose clock does.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import deque

from headrace.core.request import GenerateRequest, SamplingParams
from headrace.core.step import RunnerLimits, StepPlan, StepResult
from headrace.engine.loop import Engine

PROMPT_TOKENS = 64
WARM_STEPS = 20


class TimedNothing:
    """A Runner that draws token 1 for everyone, and knows how long it was busy with that."""

    def __init__(self, limits: RunnerLimits) -> None:
        self.limits = limits
        self.progress = 0
        self.busy_s = 0.0
        self._plans: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def close(self) -> None:
        pass

    def collect(self) -> StepResult:
        began = time.thread_time()
        draws = self._plans.popleft().draws
        result = StepResult(
            tokens=[[] if draw is None else [1] for draw in draws],
            logprobs=[[] if draw is None else [-0.5] for draw in draws],
            compute_s=0.01,
        )
        self.busy_s += time.thread_time() - began
        return result


def step_times_s(
    sequences: int, steps: int, params: SamplingParams, steps_in_flight: int, tenants: int = 1
) -> list[float]:
    """The engine's share of each of the steps that follow when all sequences are decoding."""
    runner = TimedNothing(
        RunnerLimits(
            max_batch_tokens=sequences * PROMPT_TOKENS,
            max_sequences=sequences,
            total_blocks=sequences * (PROMPT_TOKENS + steps + 2 * WARM_STEPS),
            block_tokens=16,
            context_tokens=PROMPT_TOKENS + steps + 2 * WARM_STEPS,
            steps_in_flight=steps_in_flight,
        )
    )
    engine = Engine(runner, frozenset())
    chooser = random.Random(0)
    for number in range(sequences):
        prompt = [chooser.randrange(1000) for _ in range(PROMPT_TOKENS)]
        engine.add(
            GenerateRequest(
                request_id=str(number),
                prompt_token_ids=prompt,
                params=params,
                tenant=str(number % tenants),
            )
        )
    while any(len(engine.step()) < sequences for _ in range(WARM_STEPS)):
        pass
    times_s = []
    for _ in range(steps):
        runner.busy_s = 0.0
        began = time.thread_time()
        tokens = engine.step()
        times_s.append(time.thread_time() - began - runner.busy_s)
        if len(tokens) != sequences:
            raise SystemExit(f"{len(tokens)} tokens came of a step of {sequences} sequences")
    return times_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tenants", type=int, default=1, help="who share the engine")
    args = parser.parse_args()
    ways = {
        "greedy": (SamplingParams(temperature=0.0, max_tokens=None), 1),
        "greedy, 2 in flight": (SamplingParams(temperature=0.0, max_tokens=None), 2),
        "sampled": (SamplingParams(temperature=0.8, top_p=0.9, max_tokens=None), 1),
    }
    for way, (params, steps_in_flight) in ways.items():
        for sequences in (1, 64, 256):
            rounds = [
                step_times_s(sequences, args.steps, params, steps_in_flight, args.tenants)
                for _ in range(args.rounds)
            ]
            medians = sorted(1e6 * statistics.median(times_s) for times_s in rounds)
            mean = statistics.median(1e6 * statistics.fmean(times_s) for times_s in rounds)
            least = min(1e6 * statistics.quantiles(times_s, n=10)[0] for times_s in rounds)
            print(
                f"{way:20} {sequences:4} sequences  {statistics.median(medians):7.0f} µs a step  "
                f"({medians[0]:.0f}-{medians[-1]:.0f}; mean {mean:.0f}; p10 {least:.0f}; "
                f"target {200 + 5 * sequences})"
            )


if __name__ == "__main__":
    main()
