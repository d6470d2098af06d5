"""What a simulated replica costs the machine that simulates it: steps a second and bytes.

    python benchmarks/planning/fleet.py [--rounds 5]

256 sequences that decode, prompts of 512 tokens and answers of 300: the whole engine (schedule,
submit, collect, commit) over the lean runner, in CPU time of one core; target: 1,000 steps a
second. `decoding` has no arrivals; `serving` is a replica at its limit, in which every answer that
ends makes room for another prompt, with its queue and its report. Bytes are those that Python
allocated for one replica after 2,000 requests, when its pool is full of cached blocks; target: 5 MB
with the pool of an 8B model on 80 GB (420,000 tokens in the GPU backend's blocks of 64).
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc

from headrace.core.clock import VirtualClock
from headrace.core.request import GenerateRequest, SamplingParams
from headrace.core.step import RunnerLimits
from headrace.engine.loop import Engine
from headrace.simulate.cost import linear_cost
from headrace.simulate.lean import LeanRunner
from headrace.simulate.replica import Replica, Setup
from headrace.simulate.serve import serve
from headrace.simulate.served import Served
from headrace.simulate.undisturbed import undisturbed
from headrace.workload.ask import Ask

SEQUENCES, PROMPT_TOKENS, OUTPUT_TOKENS = 256, 512, 300
POOL_TOKENS = 420_000
COST = linear_cost(0.008, 2e-5, 1e-8)


def limits(block_tokens: int = 64) -> RunnerLimits:
    return RunnerLimits(
        max_batch_tokens=8192,
        max_sequences=SEQUENCES,
        total_blocks=POOL_TOKENS // block_tokens,
        block_tokens=block_tokens,
        context_tokens=8192,
        steps_in_flight=2,
    )


def decoding_steps_s(steps: int = 250) -> float:
    clock = VirtualClock()
    engine = Engine(LeanRunner(limits(), cost=COST, clock=clock), frozenset(), None, clock)
    params = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True, seed=0)
    for number in range(SEQUENCES):
        ids = [number + 1] * PROMPT_TOKENS
        engine.add(GenerateRequest(request_id=str(number), prompt_token_ids=ids, params=params))
    while len(engine.step()) < SEQUENCES:
        pass
    with undisturbed():
        began_s = time.thread_time()
        for _ in range(steps):
            if len(engine.step()) != SEQUENCES:
                raise SystemExit(f"a step had fewer than {SEQUENCES} tokens")
        return steps / (time.thread_time() - began_s)


def serving_steps_s(requests: int = 1500) -> float:
    """Clients that ask again at once: all places are always taken."""
    asks = [
        Ask(
            at_s=0.0,
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=OUTPUT_TOKENS,
            session=number % SEQUENCES,
            turn=number // SEQUENCES,
            after_s=0.0 if number >= SEQUENCES else None,
        )
        for number in range(requests)
    ]
    began_s = time.thread_time()
    report = serve(asks, Setup(limits=limits(), cost=COST))
    if len(report.done) != requests:
        raise SystemExit(f"{requests - len(report.done)} requests were refused")
    return report.steps / (time.thread_time() - began_s)


def replica_bytes(block_tokens: int, requests: int = 2000) -> int:
    setup = Setup(limits=limits(block_tokens), cost=COST)
    _fill(Replica(setup), 8)  # what is made once for all replicas
    tracemalloc.start()
    try:
        replica = Replica(setup)
        with undisturbed():
            _fill(replica, requests)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def _fill(replica: Replica, requests: int) -> None:
    """Offers requests until so many were offered, 256 at a time, and leaves them running."""
    offered = 0
    while offered < requests:
        while replica.requests < SEQUENCES and offered < requests:
            now_s = replica.now_s
            ask = Ask(at_s=now_s, prompt_tokens=PROMPT_TOKENS, output_tokens=OUTPUT_TOKENS)
            replica.offer(Served(ask=ask, arrival_s=now_s), now_s)
            offered += 1
        replica.wake()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for name, run in (("decoding", decoding_steps_s), ("serving", serving_steps_s)):
        rates = sorted(run() for _ in range(args.rounds))
        print(
            f"{name:10} {statistics.median(rates):7.0f} steps a second  "
            f"({rates[0]:.0f}-{rates[-1]:.0f}; {SEQUENCES} sequences; target 1000)"
        )
    for block_tokens in (64, 16):
        size_mb, blocks = replica_bytes(block_tokens) / 1e6, POOL_TOKENS // block_tokens
        print(
            f"{'bytes':10} {size_mb:7.2f} MB a replica  ({blocks:,} blocks of {block_tokens} "
            f"tokens, {SEQUENCES} sequences)"
        )


if __name__ == "__main__":
    main()
