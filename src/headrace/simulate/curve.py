"""What a step costs by what was measured: a Cost from the step times of a profile.

    step = grid(decoding rows, prompt tokens)
         + line(decoding rows, their mean context)
         + slope(prompt tokens) x the mean number of tokens that each of them sees
         - output layer, where no row draws a token

Lines and slopes are those of attention: the same step measured after shorter and longer contexts.
Where a runner pads a step to the next of some sizes, the padding counts as tokens of a prompt. The
grid holds measured steps without their attention, mixed ones among them, and is read by linear
interpolation on both axes: a mixed step is never the sum of two others. More rows, tokens or
context never cost less, and no step costs less than nothing. Knows plans and measured times; no
machine, no model.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import median

from headrace.core.errors import ConfigError
from headrace.core.step import StepPlan
from headrace.hardware.profile import StepTime


class Line:
    """Straight between points, and beyond them as between the last two. Never falls."""

    def __init__(self, points: Mapping[float, float]) -> None:
        if not points:
            raise ValueError("a line needs a point")
        self._at = sorted(points)
        self._values = list(accumulate((points[at] for at in self._at), max))

    def __call__(self, at: float) -> float:
        places, values = self._at, self._values
        if len(places) == 1 or at <= places[0]:
            return values[0]
        right = min(max(bisect_right(places, at), 1), len(places) - 1)
        low, high = places[right - 1], places[right]
        slope = (values[right] - values[right - 1]) / (high - low)
        return values[right - 1] + slope * (at - low)

    @property
    def last(self) -> float:
        return self._at[-1]

    @property
    def last_slope(self) -> float:
        return self(self.last + 1) - self(self.last)


class Contexts:
    """What decoding after a longer context adds to a step after the shortest that was measured.
    Longer contexts and more rows never add less."""

    def __init__(self, points: Iterable[tuple[int, int, float]]) -> None:
        """Decoding rows, their context, and the seconds of that step."""
        by_rows: defaultdict[int, dict[float, float]] = defaultdict(dict)
        for rows, context, seconds in points:
            by_rows[rows][context] = seconds
        known = sorted({context for times in by_rows.values() for context in times})
        pairs = list(pairwise(known))
        added = [0.0] * len(pairs)  # from each context to the next, with fewer rows
        self._lines: dict[int, Line] = {}
        for rows, times in sorted(by_rows.items()):
            if len(times) < 2:
                continue
            own = Line(times)
            added = [
                max(was, own(far) - own(near))
                for was, (near, far) in zip(added, pairs, strict=True)
            ]
            self._lines[rows] = Line(dict(zip(known, accumulate(added, initial=0.0), strict=True)))
        self._rows = sorted(self._lines)

    def __call__(self, rows: float, context: float) -> float:
        if not self._rows:
            return 0.0
        first, last = self._rows[0], self._rows[-1]
        if rows <= first or rows >= last:
            end = first if rows <= first else last
            return self._lines[end](context) * rows / end
        right = bisect_right(self._rows, rows)
        low, high = self._rows[right - 1], self._rows[right]
        below, above = self._lines[low](context), self._lines[high](context)
        return below + (above - below) * (rows - low) / (high - low)


class Curve:
    """Implements `Cost`. Built from step times in any order; mixed ones may be missing in part."""

    def __init__(self, steps: Iterable[StepTime], padded_tokens: Sequence[int] = ()) -> None:
        """`padded_tokens` as in core.step.RunnerLimits."""
        self._padded = padded_tokens
        listed = [step for step in steps if step.seconds > 0]
        rows = [step for step in listed if step.decode_rows and not step.prompt_tokens]
        if not rows:
            raise ConfigError(
                "The profile has no step that decodes; expected at least one.",
                "Run headrace calibrate again.",
                param="profile",
            )
        self._head_s = _head(listed)
        self._decode = Contexts(
            (step.decode_rows, step.context_tokens, step.seconds) for step in rows
        )
        self._prompt = _slopes(
            (step.prompt_tokens, step.prompt_start, step.seconds)
            for step in listed
            if step.prompt_tokens and not step.decode_rows and step.draws
        )
        self._grid = _grid(listed, self._attention_s, self._sizes)
        self._rows = sorted(self._grid)
        # Beyond the longest chunk a token adds the same beside any number of rows: lines that each
        # went on in their own direction would cross.
        line = self._grid[self._rows[0]]
        self._last_chunk, self._chunk_token_s = line.last, line.last_slope

    def __call__(self, plan: StepPlan) -> float:
        rows = len(plan)
        if len(plan.token_ids) == rows:
            return self.seconds(decode_rows=rows, context_tokens=sum(plan.starts) / rows)
        decoding = held = prompt = 0
        attended = 0.0
        for count, start in zip(plan.counts, plan.starts, strict=True):
            if count == 1 and start:
                decoding += 1
                held += start
            else:
                prompt += count
                attended += count * (start + (count + 1) / 2)
        draws = decoding > 0 or any(draw is not None for draw in plan.draws)
        return self.seconds(
            decode_rows=decoding,
            context_tokens=held / decoding if decoding else 0.0,
            prompt_tokens=prompt,
            attended_tokens=attended / prompt,
            draws=draws,
        )

    def seconds(
        self,
        *,
        decode_rows: float,
        context_tokens: float = 0.0,
        prompt_tokens: float = 0,
        attended_tokens: float | None = None,
        draws: bool = True,
    ) -> float:
        """`context_tokens` is the mean over the rows that decode; `attended_tokens` the mean over
        the prompts' tokens of how many tokens each sees, itself included (None: one prompt). Rows
        and tokens of a mean step need not be whole."""
        if attended_tokens is None:
            attended_tokens = (prompt_tokens + 1) / 2
        step_s = self._between(*self._sizes(decode_rows, prompt_tokens))
        step_s += self._attention_s(decode_rows, context_tokens, prompt_tokens, attended_tokens)
        return step_s if draws else max(0.0, step_s - self._head_s)

    def _attention_s(self, rows: float, context: float, tokens: float, attended: float) -> float:
        step_s = self._decode(rows, context) if rows else 0.0
        return step_s + self._prompt(tokens) * attended if tokens else step_s

    def _sizes(self, decode_rows: float, prompt_tokens: float) -> tuple[float, float]:
        """As the runner computes them: padded."""
        total = decode_rows + prompt_tokens
        if not self._padded or total > self._padded[-1]:
            return decode_rows, prompt_tokens
        padded = self._padded[bisect_left(self._padded, total)]
        return (decode_rows, padded - decode_rows) if prompt_tokens else (padded, 0)

    def _between(self, decode_rows: float, prompt_tokens: float) -> float:
        rows = self._rows
        if prompt_tokens > self._last_chunk:
            more_s = (prompt_tokens - self._last_chunk) * self._chunk_token_s
            return self._between(decode_rows, self._last_chunk) + more_s
        exact = self._grid.get(int(decode_rows)) if decode_rows == int(decode_rows) else None
        if exact is not None:
            return exact(prompt_tokens)
        right = min(max(bisect_right(rows, decode_rows), 1), len(rows) - 1)
        low, high = rows[max(right - 1, 0)], rows[right]
        if low == high:
            return self._grid[low](prompt_tokens) * max(1.0, decode_rows / max(1, low))
        if decode_rows > high:  # as rows alone grow: with prompts' steps a longer one might be less
            row_s = (self._grid[high](0) - self._grid[low](0)) / (high - low)
            return self._grid[high](prompt_tokens) + max(0.0, row_s) * (decode_rows - high)
        below, above = self._grid[low](prompt_tokens), self._grid[high](prompt_tokens)
        return below + (above - below) * (decode_rows - low) / (high - low)


def _head(steps: Sequence[StepTime]) -> float:
    """What drawing a token from a prompt adds."""
    drawing = {
        (step.prompt_tokens, step.prompt_start): step.seconds
        for step in steps
        if step.draws and not step.decode_rows
    }
    found = [
        drawing[key] - step.seconds
        for step in steps
        if not step.draws and (key := (step.prompt_tokens, step.prompt_start)) in drawing
    ]
    return max(0.0, median(found)) if found else 0.0


def _grid(
    steps: Sequence[StepTime],
    attention_s: Callable[[int, float, int, float], float],
    sizes: Callable[[float, float], tuple[float, float]],
) -> dict[int, Line]:
    """For each number of decoding rows a line over prompt tokens. Never falls from one number of
    rows to the next."""
    measured: defaultdict[int, dict[float, float]] = defaultdict(dict)
    contexts: dict[tuple[int, int], int] = {}
    for step in steps:
        key = (step.decode_rows, step.prompt_tokens)
        if step.prompt_start or not step.draws or step.context_tokens > contexts.get(key, 1 << 62):
            continue
        contexts[key] = step.context_tokens
        seen = (step.prompt_tokens + 1) / 2
        added_s = attention_s(step.decode_rows, step.context_tokens, step.prompt_tokens, seen)
        rows, tokens = sizes(step.decode_rows, step.prompt_tokens)
        line = measured[int(rows)]
        line[tokens] = max(line.get(tokens, 0.0), step.seconds - added_s)
    chunks = sorted({int(chunk) for line in measured.values() for chunk in line})
    alone = measured.pop(0, {})
    grid: dict[int, Line] = {}
    floor: dict[float, float] = dict.fromkeys(chunks, 0.0)
    if alone:
        grid[0] = Line(alone)
        floor = {chunk: grid[0](chunk) if chunk else 0.0 for chunk in chunks}
    before: Line | None = grid.get(0)
    for rows in sorted(measured):
        line = dict(measured[rows])
        if 0 not in line:
            continue
        last = max(line)
        if before is not None:  # chunks that were not measured beside so many rows
            for chunk in chunks:
                if chunk > last:
                    line[chunk] = line[last] + max(0.0, before(chunk) - before(last))
        own = Line(line)
        floor = {chunk: max(floor[chunk], own(chunk)) for chunk in chunks}
        before = grid[rows] = Line(floor)
    return grid


def _slopes(points: Iterable[tuple[int, int, float]]) -> Line:
    """By tokens of a prompt: seconds for one more token that each of them sees."""
    by_size: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for size, context, seconds in points:
        by_size[size][context] = seconds
    slopes: dict[float, float] = {0: 0.0}
    for size, times in by_size.items():
        near, far = min(times), max(times)
        if far > near:
            slopes[size] = max(0.0, (times[far] - times[near]) / (far - near))
    return Line(slopes)
