"""The shapes of steps: buckets of rows, rows that have logits, and the size of the input buffer.

Numbers only: the runner allocates by them and layout.py predicts by them. Creates no tensor.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from headrace.backends.cuda.attention.plan import (
    FIELDS,
    LONG_TOKENS,
    WorkShape,
    default_tile,
)

LOGIT_ROWS = 512  # rows whose logits exist at one time, at most
LEAST_LOGIT_ROWS = 64  # also where there are fewer sequences: each may draw after several drafts
# Dense where rows are expensive: a padded row is computed like any other. Above 128 rows kernels
# use tiles of 64 rows anyway.
_BUCKETS: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_BUCKETS += (320, 384, 448, 512)
GRAPH_ROWS = _BUCKETS[-1]
DRAFT_GRAPH_ROWS = 256  # of steps with drafts, for which graphs are captured at start
_LARGE_STEP = 128  # rows between larger buckets: what a large tile computes anyway
LAUNCH_BYTES = 8 << 10  # device memory per captured launch: an estimate
MOST_GRAPHS = 160
CHANGES = 256  # of block tables in one step, beyond one per row
COUNT = 4  # int32 at the buffer's start, of which the first counts the changes


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a graph is captured for."""

    rows: int  # of the bucket: the step's own rows and padding
    tile_rows: int  # of its attention
    is_decode: bool = False  # every sequence computes one token


def row_bucket(rows: int, most: int) -> int:
    """What `rows` are padded to."""
    at = bisect.bisect_left(_BUCKETS, rows)
    bucket = _BUCKETS[at] if at < len(_BUCKETS) else -(-rows // _LARGE_STEP) * _LARGE_STEP
    return min(bucket, most)


def row_buckets(most: int) -> list[int]:
    return sorted({min(bucket, most) for bucket in _BUCKETS})


def padded_rows(most: int) -> tuple[int, ...]:
    """All numbers that rows are padded to."""
    larger = range(GRAPH_ROWS, most + _LARGE_STEP, _LARGE_STEP)
    return tuple(sorted({row_bucket(rows, most) for rows in (*_BUCKETS, *larger)}))


def logit_rows(max_batch_tokens: int, max_sequences: int) -> int:
    return min(LOGIT_ROWS, max_batch_tokens, max(max_sequences, LEAST_LOGIT_ROWS))


def aligned(count: int) -> int:
    """Parts are aligned to 16 bytes: kernels would be compiled again for other pointers."""
    return -(-count // 4) * 4


def header_ints(wanted_rows: int) -> int:
    return COUNT + aligned(wanted_rows)


def packed_ints(
    shape: WorkShape, max_rows: int, wanted_rows: int, head_dim: int, windows: int
) -> int:
    """The size of the input buffer for steps of up to `max_rows` rows, with a work list for each of
    `windows` kinds of layers: its parts are listed in inputs.py."""
    tokens = (1, 2, 4, 8, 16, 32, LONG_TOKENS)
    tiles = {default_tile(shape.tile_rows(min(each, max_rows)), head_dim) for each in tokens}
    work = max(shape.capacity(max_rows, tile) for tile in tiles) * FIELDS * windows
    rows = aligned(max_rows)
    return header_ints(wanted_rows) + 4 * rows + 2 * (rows + CHANGES) + work
