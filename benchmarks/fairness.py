"""One long prompt arrives among decoding sequences: how far do their gaps between tokens grow?

    python benchmarks/fairness.py [--prompt-tokens 8000] [--sequences 8] [--growth 2 1e9]

`--growth` are values of max_step_growth; 1e9 gives chunks as large as a step allows.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from headrace.assemble import assemble
from headrace.core.config import SchedulerConfig
from headrace.core.request import GenerateRequest, SamplingParams
from headrace.engine.loop import Engine


def measure(engine: Engine, vocab_size: int, prompt_tokens: int, sequences: int) -> None:
    chooser = random.Random(0)

    def request(name: str, count: int, output_tokens: int) -> GenerateRequest:
        return GenerateRequest(
            request_id=name,
            prompt_token_ids=[chooser.randrange(vocab_size) for _ in range(count)],
            params=SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True),
        )

    for number in range(sequences):
        engine.add(request(str(number), 64, 100_000))
    last: dict[str, float] = {}
    gaps: dict[str, list[float]] = {}
    arrived = first = 0.0
    steps_after = 0
    while steps_after < 100:
        for token in engine.step():
            now = time.perf_counter()
            if token.request_id == "long":
                first = first or now
                continue
            if token.request_id in last:
                gaps.setdefault(token.request_id, []).append(now - last[token.request_id])
            last[token.request_id] = now
        if not arrived and len(gaps.get("0", [])) == 100:
            engine.add(request("long", prompt_tokens, 1))
            arrived = time.perf_counter()
        steps_after += bool(first)
    worst = max(max(g) / statistics.median(g) for g in gaps.values())
    median = statistics.median(g for some in gaps.values() for g in some)
    print(
        f"  gaps: median {median * 1e3:.1f} ms, the worst is {worst:.1f}x its sequence's median; "
        f"the long prompt's first token after {first - arrived:.1f} s"
    )
    for name in ("long", *map(str, range(sequences))):
        engine.cancel(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--growth", type=float, nargs="+", default=[2.0, 1e9])
    args = parser.parse_args()
    assembled = assemble(args.model, kv_tokens=60_000)
    for growth in args.growth:
        print(f"max_step_growth {growth:g}")
        config = SchedulerConfig(prefix_cache=False, max_step_growth=growth)
        engine = Engine(assembled.runner, frozenset(), config)
        measure(engine, assembled.spec.vocab_size, args.prompt_tokens, args.sequences)


if __name__ == "__main__":
    main()
