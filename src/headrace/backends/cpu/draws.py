"""What a plan asks of the logits, as flat arrays for the native program, and its answers back.

One wanted row for each target to be scored and each token to be drawn. Rows whose logits need
adjusting (bias, masks, allowed and banned tokens, penalties) are listed apart, so that the others
cost nothing more. Does not know what a row's logits are; the order of operations is
backends/reference/sampling.py's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.backends.cpu import _native
from headrace.backends.draws import (
    Floats,
    Ints,
    adjusts_logits,
    collect_results,
    counted_tokens,
    flat_ids,
    flat_values,
    repeats,
)
from headrace.core.step import Draw, EntryResult, StepEntry, TopLogprobs

_SCORED = (0.0, 1.0, 0.0, 1.0, 0.0)  # in place of a draw


class DrawArrays:
    def __init__(self, entries: list[StepEntry]) -> None:
        wanted: list[int] = []
        targets: list[int] = []
        draws: list[tuple[float, float, float, float, float]] = []
        uniforms: list[float] = []
        adjusted: list[tuple[int, Draw]] = []
        tops: list[int] = []
        end = 0  # of this entry's rows
        for entry in entries:
            first, end = end, end + len(entry.token_ids)
            if entry.targets is not None:
                count = len(entry.targets)
                wanted += range(first, end)
                targets += entry.targets
                draws += [_SCORED] * count
                uniforms += [0.0] * count
                tops += [entry.top_logprobs] * count
            if (draw := entry.draw) is not None:
                if adjusts_logits(draw):
                    adjusted.append((len(wanted), draw))
                wanted.append(end - 1)
                targets.append(-1)
                draws.append(
                    (draw.temperature, draw.top_p, draw.min_p, draw.typical_p, float(draw.top_k))
                )
                uniforms.append(draw.uniform)
                tops.append(entry.top_logprobs)
        self.wanted = np.array(wanted, np.int32)
        self.targets = np.array(targets, np.int32)
        self.draws = np.array(draws, np.float64).reshape(-1, 5)
        self.uniforms = np.array(uniforms, np.float64)
        self.tokens = np.zeros(len(wanted), np.int32)  # written by the program
        self.logprobs = np.zeros(len(wanted), np.float32)  # likewise
        self.adjustments = _adjustments(adjusted) if adjusted else None
        self.tops: tuple[Ints, Ints, Floats] | None = None
        if any(tops):
            offsets = np.zeros(len(tops) + 1, np.int32)
            np.cumsum(tops, out=offsets[1:])
            self.tops = offsets, np.zeros(offsets[-1], np.int32), np.zeros(offsets[-1], np.float32)

    def run(
        self, program: _native.Program, tokens: Ints, positions: Ints, owners: Ints, tables: Ints
    ) -> None:
        program.run(
            tokens,
            positions,
            owners,
            tables,
            self.wanted,
            self.targets,
            self.draws,
            self.uniforms,
            self.tokens,
            self.logprobs,
            self.adjustments,
            self.tops,
        )

    def results(self, entries: list[StepEntry]) -> list[EntryResult]:
        return collect_results(
            entries, self.tokens.tolist(), self.logprobs.tolist(), self._top_lists()
        )

    def _top_lists(self) -> list[TopLogprobs]:
        """For each wanted row; nothing at all if no row asked."""
        if self.tops is None:
            return []
        offsets, tokens, logprobs = (part.tolist() for part in self.tops)
        pairs = list(zip(tokens, logprobs, strict=True))
        return [pairs[offsets[i] : offsets[i + 1]] for i in range(len(offsets) - 1)]


def _adjustments(adjusted: list[tuple[int, Draw]]) -> _native.Adjustments:
    draws = [draw for _, draw in adjusted]
    counts = [counted_tokens(draw) for draw in draws]
    return _native.Adjustments(
        np.array([row for row, _ in adjusted], np.int32),
        np.array(
            [(d.repetition_penalty, d.presence_penalty, d.frequency_penalty) for d in draws],
            np.float32,
        ),
        np.array([(d.allowed is not None) | (d.mask is not None) << 1 for d in draws], np.int32),
        (*_ids([d.bias for d in draws]), flat_values([d.bias.values() for d in draws])),
        _ids([() if d.allowed is None else d.allowed for d in draws]),
        _ids([d.banned for d in draws]),
        _ids([d.seen if repeats(d) else () for d in draws]),
        (*_ids(counts), flat_values([c.values() for c in counts])),
        _bytes([d.mask or b"" for d in draws]),
    )


def _ids(rows: Sequence[Collection[int]]) -> tuple[Ints, Ints]:
    """Offsets, and all rows' ids one after the other."""
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return offsets, np.concatenate([flat_ids(row) for row in rows])


def _bytes(rows: Sequence[bytes]) -> tuple[Ints, NDArray[np.uint8]]:
    """Offsets, and all rows' bytes one after the other."""
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return offsets, np.frombuffer(b"".join(rows), np.uint8)
