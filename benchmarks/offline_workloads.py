"""The workloads that offline engines are measured with, over an Engine: requests in, times out.

Greedy unless it is said otherwise, every answer as long as was asked for. Prompts are random and
new, unless a workload is about the steps after them: those come from the prefix cache, so that only
the steps are timed.
Knows no device and no other engine's figures.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.core.request import GenerateRequest, SamplingParams
from headrace.engine.loop import Engine

Prompt = list[int]

# What `draws` measures beside greedy, as SamplingParams takes it. Random weights give flat
# distributions; a low temperature makes peaked ones of them.
FLAT: dict[str, Any] = {"temperature": 0.8}
PEAKED: dict[str, Any] = {"temperature": 0.1}
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}
ALLOWED = list(range(0, 500, 2))
DRAWS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.0},
    "top_p": FLAT | {"top_p": 0.95},
    "top_k": FLAT | {"top_k": 50},
    "top_k 5000": FLAT | {"top_k": 5000},
    "top_k, top_p": FLAT | {"top_k": 5000, "top_p": 0.9},
    "min_p": FLAT | {"min_p": 0.05},
    "penalties": FLAT | PENALTIES,
    "penalties, top_p": FLAT | PENALTIES | {"top_p": 0.95},
    "mask": FLAT | {"allowed_token_ids": ALLOWED},
    "bias": FLAT | {"logit_bias": dict.fromkeys(ALLOWED, 1.0), "top_p": 0.95},
    "peaked": PEAKED,
    "peaked top_p": PEAKED | {"top_p": 0.95},
    "peaked top_k": PEAKED | {"top_k": 50},
    "peaked min_p": PEAKED | {"min_p": 0.05},
    "peaked penalties": PEAKED | PENALTIES | {"top_p": 0.95},
    "peaked mask": PEAKED | {"allowed_token_ids": ALLOWED},
    "typical_p": FLAT | {"typical_p": 0.9},
    "logprobs": FLAT | {"logprobs": 5},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large each workload is."""

    batches: tuple[int, ...] = (1, 8, 32, 64, 128, 256, 512)
    drawn: tuple[int, ...] = (1, 16, 64, 256)
    # Of the sequences whose steps are timed: the last token is computed anew though the prompt was
    # seen, and all before it fill whole blocks.
    prompt_tokens: int = 129
    decode_tokens: int = 65
    prefills: tuple[int, ...] = (512, 2048, 8192)
    long: tuple[tuple[int, int], ...] = ((16, 8192),)  # sequences, context
    long_tokens: int = 33
    mixed: tuple[int, int, int] = (256, 100, 1024)  # sequences, shortest, longest
    throughput: tuple[int, int, int] = (1000, 512, 128)  # requests, in, out
    prefix_tokens: int = 4000
    suffix_tokens: int = 16

    @property
    def longest_tokens(self) -> int:
        """The context that the longest sequence needs."""
        return max(
            self.prompt_tokens + self.decode_tokens,
            *(tokens + 1 for tokens in self.prefills),
            *(tokens + self.long_tokens for _, tokens in self.long),
            2 * self.mixed[2],
            sum(self.throughput[1:]),
            self.prefix_tokens + self.suffix_tokens + 1,
        )

    @property
    def resident_tokens(self) -> int:
        """What the KV pool has to hold for no workload to wait for memory."""
        return max(
            max(self.batches) * (self.prompt_tokens + self.decode_tokens),
            *(count * (tokens + self.long_tokens) for count, tokens in self.long),
            self.mixed[0] * self.mixed[2],
            self.longest_tokens,
        )

    @property
    def most_sequences(self) -> int:
        return max(*self.batches, *self.drawn, self.mixed[0], *(count for count, _ in self.long))


TINY = Sizes(
    batches=(1, 4),
    drawn=(2,),
    prompt_tokens=32,
    decode_tokens=6,
    prefills=(48, 96),
    long=((2, 128),),
    long_tokens=4,
    mixed=(6, 8, 24),
    throughput=(8, 16, 4),
    prefix_tokens=128,
)


@dataclass(frozen=True, slots=True)
class Figure:
    """A median and what it is of."""

    name: str
    unit: str  # "ms", "s": lower is better; "tokens/s": higher
    value: float
    samples: list[float] = field(default_factory=list)
    note: str = ""

    @classmethod
    def of(cls, name: str, unit: str, samples: list[float]) -> Figure:
        return cls(name, unit, statistics.median(samples), samples)


class Bench:
    """Runs requests through an engine, and counts what comes out."""

    def __init__(
        self,
        engine: Engine,
        vocab_size: int,
        *,
        rounds: int = 3,
        is_late: Callable[[], bool] = lambda: False,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        self._engine = engine
        self._sampling = dict(sampling or {"temperature": 0})
        self._vocab_size = vocab_size
        self._rounds = rounds
        self._is_late = is_late
        self._chooser = random.Random(20260801)
        self._numbers = itertools.count()
        self.busy = 0.0  # of the last run: the share of its time that the runner was computing

    def prompt(self, tokens: int) -> Prompt:
        """One that nobody has seen."""
        return self._chooser.choices(range(self._vocab_size), k=tokens)

    def rounds(self, share: int = 1) -> Iterator[int]:
        """Round numbers; fewer where a round is long, and one at least when time is up."""
        for number in range(max(1, self._rounds // share)):
            if number and self._is_late():
                return
            yield number

    def run(
        self, jobs: list[tuple[Prompt, int]], sampling: Mapping[str, Any] | None = None
    ) -> float:
        """(prompt, output tokens) all at once, to their end: the seconds it took."""
        asked = self._sampling if sampling is None else sampling
        requests = [
            GenerateRequest(
                request_id=str(next(self._numbers)),
                prompt_token_ids=prompt,
                params=SamplingParams(**asked, max_tokens=tokens, ignore_eos=True),
            )
            for prompt, tokens in jobs
        ]
        engine, count = self._engine, 0
        stats = engine.stats
        computed_s = stats.compute_s + stats.sample_s
        began = time.perf_counter()
        for request in requests:
            engine.add(request)
        while engine.has_work:
            for token in engine.step():
                if token.error is not None:
                    raise SystemExit(f"request {token.request_id} failed: {token.error}")
                count += 1
        took = time.perf_counter() - began
        self.busy = (stats.compute_s + stats.sample_s - computed_s) / took
        expected = sum(tokens for _, tokens in jobs)
        if count != expected:
            raise SystemExit(f"{count} tokens came out; expected {expected}")
        return took


def decode(bench: Bench, sizes: Sizes) -> Iterator[Figure]:
    for batch in sizes.batches:
        prompts = [bench.prompt(sizes.prompt_tokens) for _ in range(batch)]
        samples = _step_times(bench, prompts, sizes.decode_tokens)
        yield Figure.of(f"decode {batch}", "ms", samples)


def long(bench: Bench, sizes: Sizes) -> Iterator[Figure]:
    for count, tokens in sizes.long:
        prompts = [bench.prompt(tokens) for _ in range(count)]
        samples = _step_times(bench, prompts, sizes.long_tokens)
        yield Figure.of(f"long {count} x {tokens}", "ms", samples)


def _step_times(bench: Bench, prompts: list[Prompt], tokens: int) -> list[float]:
    """Milliseconds a step: (time of n tokens - time of 1) / (n - 1), each round."""
    bench.run([(prompt, 1) for prompt in prompts])  # fills the prefix cache
    bench.run([(prompt, min(tokens, 4)) for prompt in prompts])  # compiles and captures
    samples: list[float] = []
    for _ in bench.rounds():
        first = bench.run([(prompt, 1) for prompt in prompts])
        whole = bench.run([(prompt, tokens) for prompt in prompts])
        samples.append(1e3 * (whole - first) / (tokens - 1))
    return samples


def draws(bench: Bench, sizes: Sizes) -> Iterator[Figure]:
    """Steps that draw in every way, each beside greedy ones of the same minute."""
    for batch in sizes.drawn:
        prompts = [bench.prompt(sizes.prompt_tokens) for _ in range(batch)]
        bench.run([(prompt, 1) for prompt in prompts])  # fills the prefix cache
        greedy: dict[str, Any] = {"temperature": 0}
        for name, sampling in DRAWS.items():
            samples: list[float] = []
            ratios: list[float] = []
            for each in (greedy, sampling):  # compiles and captures
                bench.run([(prompt, 4) for prompt in prompts], each)
            for _ in bench.rounds():
                pair = [_step_time(bench, prompts, sizes, each) for each in (greedy, sampling)]
                samples.append(pair[1])
                ratios.append(pair[0] / pair[1])
            note = f"{statistics.median(ratios):.3f}x of greedy"
            value = statistics.median(samples)
            yield Figure(f"draws {batch} {name}", "ms", value, samples, note)


def _step_time(
    bench: Bench, prompts: list[Prompt], sizes: Sizes, sampling: dict[str, Any]
) -> float:
    first = bench.run([(prompt, 1) for prompt in prompts], sampling)
    whole = bench.run([(prompt, sizes.decode_tokens) for prompt in prompts], sampling)
    return 1e3 * (whole - first) / (sizes.decode_tokens - 1)


def prefill(bench: Bench, sizes: Sizes) -> Iterator[Figure]:
    for tokens in sizes.prefills:
        for _ in range(2):
            bench.run([(bench.prompt(tokens), 1)])
        samples = [
            1e3 * bench.run([(bench.prompt(tokens), 1)]) for _ in bench.rounds() for _ in range(3)
        ]
        yield Figure.of(f"prefill {tokens}", "ms", samples)


def mixed_lengths(sizes: Sizes) -> list[tuple[int, int]]:
    """(in, out) of each sequence, from Python's random with seed 0."""
    count, low, high = sizes.mixed
    chooser = random.Random(0)
    return [(chooser.randint(low, high), chooser.randint(low, high)) for _ in range(count)]


def mixed(bench: Bench, sizes: Sizes) -> Iterator[Figure]:
    lengths = mixed_lengths(sizes)
    bench.run([(bench.prompt(tokens), -(-out // 8)) for tokens, out in lengths])
    samples: list[float] = []
    for _ in bench.rounds(share=3):
        took = bench.run([(bench.prompt(tokens), out) for tokens, out in lengths])
        samples.append(sum(out for _, out in lengths) / took)
    yield Figure.of("mixed", "tokens/s", samples)


def throughput(bench: Bench, sizes: Sizes) -> Iterator[Figure]:
    count, tokens, out = sizes.throughput
    bench.run([(bench.prompt(tokens), -(-out // 8)) for _ in range(-(-count // 4))])
    samples: list[float] = []
    for _ in bench.rounds(share=3):
        took = bench.run([(bench.prompt(tokens), out) for _ in range(count)])
        samples.append(count * (tokens + out) / took)
    yield Figure.of("throughput", "tokens/s", samples)


def prefix(bench: Bench, sizes: Sizes) -> Iterator[Figure]:
    """Time to the first token of two prompts with the same beginning, the second right after the
    first."""
    cold: list[float] = []
    warm: list[float] = []
    _prefix_pair(bench, sizes)  # compiles and captures
    for _ in bench.rounds():
        for _ in range(3):
            first, second = _prefix_pair(bench, sizes)
            cold.append(1e3 * first)
            warm.append(1e3 * second)
    yield Figure.of("prefix cold", "ms", cold)
    yield Figure.of("prefix warm", "ms", warm)


def _prefix_pair(bench: Bench, sizes: Sizes) -> tuple[float, float]:
    beginning = bench.prompt(sizes.prefix_tokens)
    first, second = (
        bench.run([(beginning + bench.prompt(sizes.suffix_tokens), 1)]) for _ in range(2)
    )
    return first, second


# In the order in which they are taken while there is time.
WORKLOADS: dict[str, Callable[[Bench, Sizes], Iterator[Figure]]] = {
    "decode": decode,
    "draws": draws,
    "prefill": prefill,
    "long": long,
    "mixed": mixed,
    "throughput": throughput,
    "prefix": prefix,
}
