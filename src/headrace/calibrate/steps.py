"""Step times of a runner: which steps are measured, and how.

A point is a step that has decoding rows, a prompt, or both. Points are measured in turn, round
after round, so that other work on the machine is unfair to none; what is kept is their mean. The
runner's blocks are written before: memory that was never written is read too fast. A runner that
takes a plan while it computes another is measured so: a step is then the time from one result to
the next. Knows runners; no engine and no server.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

from headrace.calibrate.statistic import mean, spread
from headrace.core.step import DrawParams, Runner, RunnerLimits, StepPlan
from headrace.hardware.profile import StepTime

GREEDY = DrawParams(temperature=0.0)
CONTEXT = 32  # before rows that decode, where the context is not what is measured
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CHUNKS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
MIXED_CHUNKS = (16, 64, 128, 256, 512, 2048, 8192)  # beside rows that decode
# Of a runner that pads its steps: sizes that it pads to, and beside rows that decode such that both
# together are one of them.
PADDED_ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
PADDED_CHUNKS: tuple[int, ...] = (
    1,
    16,
    32,
    64,
    96,
    128,
    160,
    192,
    256,
    320,
    384,
    448,
    512,
    640,
    768,
    1024,
    1280,
)
PADDED_CHUNKS += (1536, 2048, 3072, 4096, 8192)
PADDED_TOTALS = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
CONTEXTS = (256, 1024, 4096)
STARTS = (512, 2048)
SHORT_TOKENS = 64  # in a step that is measured after one of its kind
OVERLAPPED_STEPS = 4  # of which the first is not counted
WARM_STEPS = 4  # a graph is captured at the third sight of its shape
FILLED, COPIED, FIRST_VERSION = 1, 2, 3  # of tables
MOST_TOKENS = 16_384  # in the blocks of one step: more takes too long to fill
MOST_GPU_TOKENS = 131_072


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    decode_rows: int = 0
    context_tokens: int = CONTEXT
    prompt_tokens: int = 0
    prompt_start: int = 0
    draws: bool = True

    @property
    def batch_tokens(self) -> int:
        return self.decode_rows + self.prompt_tokens

    def blocks(self, block_tokens: int) -> int:
        rows = self.decode_rows * -(-(self.context_tokens + 1) // block_tokens)
        return rows + -(-(self.prompt_start + self.prompt_tokens) // block_tokens)

    def plan(self, tokens: Sequence[int], block_tokens: int, version: int = 0) -> StepPlan:
        """`version` is that of its tables, which are those of no other point."""
        plan = StepPlan()
        width = -(-(self.context_tokens + 1) // block_tokens)
        for row in range(self.decode_rows):
            table = list(range(row * width, (row + 1) * width))
            plan.add(row, [tokens[row]], self.context_tokens, table, version, draw=GREEDY)
        if self.prompt_tokens:
            end = self.prompt_start + self.prompt_tokens
            first = self.decode_rows * width
            plan.add(
                self.decode_rows,
                [tokens[at % len(tokens)] for at in range(self.prompt_tokens)],
                self.prompt_start,
                list(range(first, first + -(-end // block_tokens))),
                version,
                draw=GREEDY if self.draws else None,
            )
        return plan


def points_for(limits: RunnerLimits) -> list[Point]:
    """Decoding rows by prompt tokens, decoding after longer contexts, prompts after a start."""
    is_padded = bool(limits.padded_tokens)
    sizes, lengths = (PADDED_ROWS, PADDED_CHUNKS) if is_padded else (ROWS, CHUNKS)
    rows = [n for n in sizes if n < limits.max_sequences] + [limits.max_sequences]
    rows = sorted({n for n in rows if n <= max(sizes)})
    most = limits.max_batch_tokens
    chunks = sorted({n for n in (*lengths, most) if n <= min(most, limits.context_tokens - 1)})
    found = [Point(decode_rows=n) for n in rows]
    found += [Point(prompt_tokens=n) for n in chunks]
    if is_padded:
        pairs = [(n, total - n) for n in rows for total in PADDED_TOTALS if n < total <= most]
    else:
        pairs = [(n, p) for n in rows for p in MIXED_CHUNKS if p < most]
    found += [Point(decode_rows=n, prompt_tokens=p) for n, p in pairs]
    found += [Point(decode_rows=n, context_tokens=c) for n in rows for c in CONTEXTS]
    long = [n for n in CHUNKS if 16 <= n <= chunks[-1]]
    found += [Point(prompt_tokens=p, prompt_start=s) for p in long[::2] for s in STARTS]
    found += [Point(prompt_tokens=16, draws=False)] if 16 in chunks else []
    return [point for point in found if _fits(point, limits)]


def _fits(point: Point, limits: RunnerLimits) -> bool:
    held = point.blocks(limits.block_tokens)
    return (
        point.batch_tokens <= limits.max_batch_tokens
        and point.context_tokens < limits.context_tokens
        and point.prompt_start + point.prompt_tokens < limits.context_tokens
        and point.decode_rows + bool(point.prompt_tokens) <= limits.max_sequences
        and held <= limits.total_blocks
        and held * limits.block_tokens <= most_tokens(limits)
    )


def most_tokens(limits: RunnerLimits) -> int:
    """A GPU copies blocks fast."""
    return MOST_GPU_TOKENS if limits.padded_tokens else MOST_TOKENS


def needed_tokens(points: Iterable[Point], block_tokens: int) -> int:
    """For how many tokens the blocks of these points are."""
    return block_tokens * max((point.blocks(block_tokens) for point in points), default=1)


class Steps:
    """A runner, ready to be measured."""

    def __init__(
        self, runner: Runner, vocab_size: int, now_s: Callable[[], float] = time.perf_counter
    ) -> None:
        self.limits = runner.limits
        self._now_s = now_s
        self._runner = runner
        random = Random(0)
        self._tokens = [random.randrange(vocab_size) for _ in range(1024)]
        # A runner keeps tables that it has seen, by version.
        self._versions: dict[Point, int] = {}

    def fill(self, points: Iterable[Point]) -> None:
        """Write every block that a point reads: one prompt is computed, and copied."""
        size = self.limits.block_tokens
        total = min(needed_tokens(points, size) // size, self.limits.total_blocks)
        first = min(total, 256 // size or 1, self.limits.max_batch_tokens // size or 1)
        whole = StepPlan()
        tokens = self._tokens[: min(first * size, self.limits.max_batch_tokens)]
        whole.add(0, tokens, 0, list(range(first)), version=FILLED)
        self._run(whole)
        for at in range(first, total, 4096):
            plan = StepPlan()
            plan.copies += [(block % first, block) for block in range(at, min(at + 4096, total))]
            plan.add(0, tokens[:1], 0, [0], version=COPIED)  # a plan has a row
            self._run(plan)

    def seconds(self, point: Point) -> float:
        return self._run(self.plan(point))

    def warm_up(self, point: Point) -> None:
        """The first times of a shape may allocate, compile a kernel, or capture a graph."""
        for _ in range(WARM_STEPS if self._is_overlapped else 1):
            self.seconds(point)

    def settled_seconds(self, point: Point) -> float:
        """Of a step among others like it, as when a server decodes: after a step of another kind
        caches hold other things, and threads may have gone to sleep."""
        if self._is_overlapped:
            return self._overlapped_s(point)
        if point.batch_tokens > SHORT_TOKENS:  # so long that it does not matter
            return self.seconds(point)
        self.seconds(point)
        return (self.seconds(point) + self.seconds(point)) / 2

    @property
    def _is_overlapped(self) -> bool:
        return self.limits.steps_in_flight > 1

    def _overlapped_s(self, point: Point) -> float:
        """With the next step submitted before a result is waited for."""
        plan = self.plan(point)
        self._runner.submit(plan)
        ended_s = []
        for _ in range(OVERLAPPED_STEPS):
            self._runner.submit(plan)
            self._runner.collect()
            ended_s.append(self._now_s())
        self._runner.collect()
        return (ended_s[-1] - ended_s[0]) / (OVERLAPPED_STEPS - 1)

    def plan(self, point: Point) -> StepPlan:
        version = self._versions.setdefault(point, FIRST_VERSION + len(self._versions))
        return point.plan(self._tokens, self.limits.block_tokens, version)

    def _run(self, plan: StepPlan) -> float:
        self._runner.submit(plan)
        return self._runner.collect().compute_s


def measure(
    seconds_of: Callable[[Point], float],
    points: Sequence[Point],
    *,
    is_over: Callable[[int], bool],
    tell: Callable[[int], None] = lambda done: None,
) -> tuple[tuple[StepTime, ...], bool]:
    """Rounds over all points until `is_over(rounds)`. A Ctrl-C ends it early (then True is
    returned beside what was measured by then); before anything was, it is raised."""
    found: defaultdict[Point, list[float]] = defaultdict(list)
    done = rounds = 0
    is_stopped = False
    try:
        while not is_over(rounds):
            for point in points:
                taken_s = seconds_of(point)
                found[point].append(taken_s)
                done += 1
                tell(done)
            rounds += 1
    except KeyboardInterrupt:
        if not found:
            raise
        is_stopped = True
    times = tuple(
        StepTime(
            decode_rows=point.decode_rows,
            context_tokens=point.context_tokens if point.decode_rows else 0,
            prompt_tokens=point.prompt_tokens,
            prompt_start=point.prompt_start,
            draws=point.draws,
            seconds=mean(values),
            spread=spread(values),
            repetitions=len(values),
        )
        for point, values in found.items()
    )
    return times, is_stopped
