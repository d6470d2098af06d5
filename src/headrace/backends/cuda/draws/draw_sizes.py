"""How large the memory is that draws need: drawing.py and sampling.py allocate it, layout.py
predicts it.

Numbers only; creates no tensor.
"""

from __future__ import annotations

PIECES = 16  # of a row of logits, in the first pass, at most
ASKED = 24  # int32 in a row of parameters
STATE = 4  # int32 of a row between kernels
ROWS_TOGETHER = 32  # whose alternatives are found at one time: sort keys of whole rows take memory
# Temporary bytes per token of a row: a copy, a key, and torch's memory to find the largest keys.
SCRATCH_ROW_BYTES = 48
BLOCK = 2048  # tokens
BINS = 64
DEPTHS = 8
WIDE = 4 * BLOCK  # tokens per histogram: each histogram has a high fixed cost
MOST_PIECES = 16  # of a row: the programs that count and weigh its tokens
CANDIDATES = 2048  # at most, per cut; twice as many for a large vocabulary
LARGE_VOCAB = 1 << 17
EDGES = 2  # float32 likewise


def pieces_of(rows: int) -> int:
    """Programs per row: enough to fill a GPU, without making the tables too large."""
    return MOST_PIECES if rows <= 64 else 8 if rows <= 128 else 4


def candidates_of(vocab: int) -> int:
    return CANDIDATES if vocab <= LARGE_VOCAB else 2 * CANDIDATES


def most_pieces(rows: int) -> int:
    """The most pieces of all rows together, for up to `rows` rows."""
    return max(some * pieces_of(some) for some in (64, 128, rows) if some <= max(rows, 64))


def blocks_of(vocab: int) -> int:
    """Blocks of a row, rounded up to a power of two."""
    return 1 << (-(-vocab // BLOCK) - 1).bit_length()


def work_bytes(rows: int, vocab: int) -> int:
    """Of `drawing.DrawWork`."""
    pieces = 4 * most_pieces(rows) * (DEPTHS + BINS)
    each_row = 4 * (STATE + EDGES + candidates_of(vocab)) + 8 * (blocks_of(vocab) + MOST_PIECES)
    return pieces + rows * each_row


def sampler_bytes(rows: int, results: int, slots: int, vocab: int) -> int:
    """Of `sampling.Sampler`, with the rows' parameters, draws and adjustments."""
    own = 4 * (3 * results + 4 * rows * PIECES + rows * ASKED)
    adjusting = 4 * rows * vocab + slots * 2 * vocab + (slots + rows) * -(-vocab // 8)
    return own + work_bytes(rows, vocab) + adjusting
