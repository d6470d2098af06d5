"""What a plan asks of the logits, as the native program takes it, and its answers back.

The flattening is backends/draws.py's; here are the program's own shapes: a draw for every wanted
row, offsets in the place of owners, alternatives one after the other. Does not know what a row's
logits are; the order of operations is backends/reference/sampling.py's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.backends.cpu import _native
from headrace.backends.draws import (
    Adjustments,
    Floats,
    Ints,
    Longs,
    Wanted,
    collect_results,
)
from headrace.core.step import Drawn, EntryResult, StepEntry, TopLogprobs

# Of a row that is scored or wants its likeliest token: temperature 0, and no filter.
_LIKELIEST = (0.0, 1.0, 0.0, 1.0, 0.0)


class DrawArrays:
    def __init__(self, entries: list[StepEntry]) -> None:
        self._wanted = wanted = Wanted(entries)
        count = len(wanted.rows)
        self._draws = np.full((count, 5), _LIKELIEST)
        self._draws[wanted.sampled] = wanted.draws
        self._uniforms = np.zeros(count)
        self._uniforms[wanted.sampled] = wanted.uniforms
        self._tokens = np.zeros(count, np.int32)  # written by the program
        self._logprobs = np.zeros(count, np.float32)  # likewise
        self._adjustments: _native.Adjustments | None = None
        if wanted.adjusting:
            self._adjustments = _native_adjustments(Adjustments.of(wanted.adjusting))
        self._tops: tuple[Ints, Ints, Floats] | None = None
        if len(wanted.topped):
            offsets = _offsets(wanted.tops)
            total = offsets[-1]
            self._tops = offsets, np.zeros(total, np.int32), np.zeros(total, np.float32)

    def run(
        self, program: _native.Program, tokens: Ints, positions: Ints, owners: Ints, tables: Ints
    ) -> None:
        program.run(
            tokens,
            positions,
            owners,
            tables,
            self._wanted.rows,
            self._wanted.targets,
            self._draws,
            self._uniforms,
            self._tokens,
            self._logprobs,
            self._adjustments,
            self._tops,
        )

    @property
    def drawing(self) -> Collection[int]:
        """The sequences that draw a token."""
        return self._wanted.drawn

    def drawn(self, entries: list[StepEntry]) -> Drawn | None:
        """The results, if all that was asked for is a token for each entry, and each got one."""
        wanted = self._wanted
        if len(wanted.drawn) != len(entries) or len(wanted.scored) or self._tops is not None:
            return None
        tokens = self._tokens.tolist()
        if min(tokens) < 0:
            return None
        return Drawn(list(wanted.drawn), tokens, self._logprobs.tolist())

    def results(self, entries: list[StepEntry]) -> list[EntryResult]:
        return collect_results(
            entries, self._tokens.tolist(), self._logprobs.tolist(), self._top_lists()
        )

    def _top_lists(self) -> list[TopLogprobs]:
        """For each wanted row; nothing at all if no row asked."""
        if self._tops is None:
            return []
        offsets, tokens, logprobs = (part.tolist() for part in self._tops)
        pairs = list(zip(tokens, logprobs, strict=True))
        return [pairs[offsets[i] : offsets[i + 1]] for i in range(len(offsets) - 1)]


def _native_adjustments(asked: Adjustments) -> _native.Adjustments:
    def part(owners: Longs, ids: Ints) -> tuple[Ints, Ints]:
        return _offsets(np.bincount(owners, minlength=len(asked.rows))), ids

    masks = asked.mask_bytes
    return _native.Adjustments(
        asked.rows,
        asked.penalties,
        asked.has_allowed | asked.has_mask.astype(np.int32) << 1,
        (*part(asked.bias_owners, asked.bias_ids), asked.bias_values),
        part(asked.allowed_owners, asked.allowed_ids),
        part(asked.banned_owners, asked.banned_ids),
        part(asked.seen_owners, asked.seen_ids),
        (*part(asked.count_owners, asked.count_ids), asked.count_values),
        (_offsets([len(mask) for mask in masks]), np.frombuffer(b"".join(masks), np.uint8)),
    )


def _offsets(sizes: Sequence[int] | NDArray[np.integer]) -> Ints:
    """Where each begins when they lie one after the other, and where the last one ends."""
    offsets = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    return offsets
