"""What a plan asks of the logits, as flat arrays that any backend can take, and answers back.

One wanted row for each target to be scored and each token to be drawn. Rows whose logits need
adjusting (bias, masks, allowed and banned tokens, penalties) are listed apart, so that the others
cost nothing more. Does not know what a row's logits are; the order of operations is
backends/reference/sampling.py's.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from headrace.core.step import Draw, EntryResult, FlatBias, StepEntry, TopLogprobs

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float32]

NOT_NUMBERS = -1
FAILURES = {  # what a sampler gives in place of a token
    NOT_NUMBERS: "The model gave logits that are not numbers.",
    -2: "No token may follow: all that are allowed are banned or masked; expected one or more.",
    -3: "Bias and penalties took a logit past the range of float32.",
}


_NO_ROWS: Ints = np.empty(0, np.int32)
_NO_DRAWS: NDArray[np.float64] = np.empty((0, 5), np.float64)
_NO_UNIFORMS: NDArray[np.float64] = np.empty(0, np.float64)
# Of steps that decode a token of each sequence: always the same, made once. Nobody writes to them.
_SEQUENCES = 1024
_EACH_ROW: Ints = np.arange(_SEQUENCES, dtype=np.int32)
_ALL_DRAWN: Ints = np.full(_SEQUENCES, -1, np.int32)
_NO_TOPS: Ints = np.zeros(_SEQUENCES, np.int32)
for _kept in (_EACH_ROW, _ALL_DRAWN, _NO_TOPS):
    _kept.flags.writeable = False


class Wanted:
    """A plan's wanted rows, in order. `sampled`, `scored` and `topped` are numbers of wanted rows
    that need more than the likeliest token: a draw, a target, alternatives. `adjusting` lists those
    draws that change the logits first, with their entries."""

    def __init__(self, entries: Sequence[StepEntry]) -> None:
        self.drawn: dict[int, int] = {}  # sequence -> the wanted row of its draw
        if _are_plain(entries):
            self._take_plain(entries)
        else:
            self._take(entries)

    def _take_plain(self, entries: Sequence[StepEntry]) -> None:
        """Every draw is of the likeliest token, and nothing else is wanted."""
        counts = [len(entry.token_ids) for entry in entries]
        drawing = [entry.draw is not None for entry in entries]
        ids = [entry.sequence_id for entry in entries]
        count = len(ids)
        if max(counts, default=0) == 1 and count <= _SEQUENCES and all(drawing):
            self.rows = _EACH_ROW[:count]
        else:
            ends = np.cumsum(counts)
            if not all(drawing):
                ends = ends[drawing]
                ids = list(compress(ids, drawing))
                count = len(ids)
            self.rows = (ends - 1).astype(np.int32)
        self.drawn = dict(zip(ids, range(count), strict=True))
        if count <= _SEQUENCES:
            self.targets, self.tops = _ALL_DRAWN[:count], _NO_TOPS[:count]
        else:
            self.targets, self.tops = np.full(count, -1, np.int32), np.zeros(count, np.int32)
        self.scored = self.sampled = self.topped = _NO_ROWS
        self.draws, self.uniforms = _NO_DRAWS, _NO_UNIFORMS
        self.adjusting: list[tuple[int, StepEntry]] = []

    def _take(self, entries: Sequence[StepEntry]) -> None:
        rows: list[int] = []  # of the step
        targets: list[int] = []  # -1: a token is drawn
        sampled: list[int] = []
        draws: list[tuple[float, float, float, float, float]] = []
        uniforms: list[float] = []
        adjusting: list[tuple[int, StepEntry]] = []
        tops: list[int] = []
        likeliest: Draw | None = None  # one that was seen to want that alone: most are the same
        end = 0  # of this entry's rows
        for entry in entries:
            first, end = end, end + len(entry.token_ids)
            if entry.targets is not None:
                rows += range(first, end)
                targets += entry.targets
                tops += [entry.top_logprobs] * len(entry.targets)
            if (draw := entry.draw) is None:
                continue
            number = len(rows)
            if draw is not likeliest:
                adjusts = adjusts_logits(draw)
                if adjusts:
                    adjusting.append((number, entry))
                if adjusts or draw.temperature != 0:
                    sampled.append(number)
                    filters = (draw.top_p, draw.min_p, draw.typical_p, float(draw.top_k))
                    draws.append((draw.temperature, *filters))
                    uniforms.append(draw.uniform)
                else:
                    likeliest = draw
            self.drawn[entry.sequence_id] = number
            rows.append(end - 1)
            targets.append(-1)
            tops.append(entry.top_logprobs)
        self.rows = np.array(rows, np.int32)
        self.targets = np.array(targets, np.int32)
        self.scored = np.flatnonzero(self.targets >= 0).astype(np.int32)
        self.sampled = np.array(sampled, np.int32)
        self.draws = np.array(draws, np.float64).reshape(-1, 5)
        self.uniforms = np.array(uniforms, np.float64)
        self.tops = np.array(tops, np.int32)
        self.topped = np.flatnonzero(self.tops).astype(np.int32)
        self.adjusting = adjusting

    @property
    def is_drawn_only(self) -> bool:
        """Whether every row wants a token and nothing more."""
        return not (len(self.scored) or len(self.topped))

    def draws_within(self, first: int, end: int) -> bool:
        """Whether one of these wanted rows needs a draw."""
        low, high = np.searchsorted(self.sampled, (first, end))
        return bool(low < high)

    @property
    def most_tops(self) -> int:
        return int(self.tops.max(initial=0)) if len(self.topped) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustments:
    """Adjusted rows one after the other. Ids come flat, each with its owner: the place in `rows`
    of the row that it belongs to."""

    rows: Ints  # numbers of wanted rows, rising
    penalties: Floats  # [n, 3]: repetition, presence, frequency
    has_allowed: NDArray[np.bool_]
    has_mask: NDArray[np.bool_]
    bias_owners: Longs
    bias_ids: Ints
    bias_values: Floats
    allowed_owners: Longs
    allowed_ids: Ints
    banned_owners: Longs
    banned_ids: Ints
    seen_owners: Longs
    seen_ids: Ints  # may come more than once
    count_owners: Longs
    count_ids: Ints
    count_values: Floats
    mask_bytes: tuple[bytes, ...]

    @classmethod
    def of(cls, adjusted: Sequence[tuple[int, StepEntry]]) -> Adjustments:
        draws = [entry.draw for _, entry in adjusted if entry.draw is not None]
        counts = [_counted_tokens(draw) for draw in draws]
        output_owners, output_ids = _owned([ids for ids, _ in counts])
        bias_owners, bias_ids = _owned([flat_bias(d.bias)[0] for d in draws])
        allowed_owners, allowed_ids = _owned([d.allowed or () for d in draws])
        banned_owners, banned_ids = _owned([d.banned for d in draws])
        seen_owners, seen_ids = _owned([d.history if _repeats(d) else () for d in draws])
        return cls(
            rows=np.array([row for row, _ in adjusted], np.int32),
            penalties=np.array(
                [(d.repetition_penalty, d.presence_penalty, d.frequency_penalty) for d in draws],
                np.float32,
            ),
            has_allowed=np.array([d.allowed is not None for d in draws]),
            has_mask=np.array([d.mask is not None for d in draws]),
            bias_owners=bias_owners,
            bias_ids=bias_ids,
            bias_values=np.concatenate([flat_bias(d.bias)[1] for d in draws]),
            allowed_owners=allowed_owners,
            allowed_ids=allowed_ids,
            banned_owners=banned_owners,
            banned_ids=banned_ids,
            seen_owners=seen_owners,
            seen_ids=seen_ids,
            count_owners=output_owners,
            count_ids=output_ids,
            count_values=_flat_values([often for _, often in counts]),
            mask_bytes=tuple(d.mask or b"" for d in draws),
        )


def collect_results(
    entries: Sequence[StepEntry],
    tokens: list[int],
    logprobs: list[float],
    tops: Sequence[TopLogprobs],
) -> list[EntryResult]:
    """Of wanted rows in order; `tops` may be empty if nobody asked."""
    plain = not tops and all(e.targets is None and e.draw is not None for e in entries)
    if plain and min(tokens, default=0) >= 0:  # as most are: a token for each, and nothing else
        return [
            EntryResult(sequence_id=entry.sequence_id, token_id=token, logprob=logprob)
            for entry, token, logprob in zip(entries, tokens, logprobs, strict=True)
        ]
    results: list[EntryResult] = []
    at = 0
    for entry in entries:
        result = EntryResult(sequence_id=entry.sequence_id)
        results.append(result)
        first = at
        if entry.targets is not None:
            at += len(entry.targets)
            result.target_logprobs = logprobs[first:at]
            if entry.top_logprobs:
                result.target_top = list(tops[first:at])
        if entry.draw is not None:
            if tokens[at] >= 0:
                result.token_id, result.logprob = tokens[at], logprobs[at]
                if entry.top_logprobs:
                    result.top = tops[at]
            at += 1
        worst = min(tokens[first:at], default=0)
        if worst < 0:
            result.error, result.is_own_fault = FAILURES[worst], worst != NOT_NUMBERS
    return results


def _are_plain(entries: Sequence[StepEntry]) -> bool:
    """Whether all draws are one and the same, of the likeliest token, and nothing else is asked
    for."""
    likeliest: Draw | None = None
    for entry in entries:
        draw = entry.draw
        if draw is not likeliest and draw is not None:
            if likeliest is not None or draw.temperature != 0 or adjusts_logits(draw):
                return False
            likeliest = draw
        if entry.targets is not None or entry.top_logprobs:
            return False
    return True


def _repeats(draw: Draw) -> bool:
    return draw.repetition_penalty != 1 and len(draw.history) > 0


def _counted_tokens(draw: Draw) -> tuple[Ints, Longs]:
    """The output tokens that presence and frequency penalties are about; how often each came."""
    output = draw.history[draw.prompt_tokens :]
    if draw.presence_penalty == 0 and draw.frequency_penalty == 0:
        output = ()
    return np.unique(flat_ids(output), return_counts=True)


def adjusts_logits(draw: Draw) -> bool:
    """Whether it draws from other logits than the model's: biased, masked or penalized ones."""
    return (
        draw.allowed is not None
        or draw.mask is not None
        or len(draw.bias) > 0
        or len(draw.banned) > 0
        or penalizes(draw)
    )


def penalizes(draw: Draw) -> bool:
    """Whether the tokens so far make a difference."""
    return draw.repetition_penalty != 1 or draw.presence_penalty != 0 or draw.frequency_penalty != 0


def flat_ids(ids: Collection[int]) -> Ints:
    if isinstance(ids, (np.ndarray, array)):  # no Python number in between
        return np.asarray(ids, np.int32)
    return np.fromiter(ids, np.int32, len(ids))


def flat_bias(bias: Mapping[int, float]) -> tuple[Ints, Floats]:
    """Ids and values."""
    if isinstance(bias, FlatBias):  # no Python number in between
        return np.asarray(bias.flat_ids, np.int32), np.asarray(bias.flat_values, np.float32)
    return flat_ids(bias), np.fromiter(bias.values(), np.float32, len(bias))


def _flat_values(rows: Iterable[Collection[float]]) -> Floats:
    return np.concatenate([np.fromiter(row, np.float32, len(row)) for row in rows])


def _owned(rows: Sequence[Collection[int]]) -> tuple[Longs, Ints]:
    """All rows' ids one after the other, and whose each is."""
    owners = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    return owners, np.concatenate([flat_ids(row) for row in rows])
