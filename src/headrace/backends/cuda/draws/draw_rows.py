"""What the kernels that draw share: what is asked of a row, what becomes of it, and of a token its
key, its depth and its weight.

A token's depth is how far its logit lies below the largest, in 2**30 steps down to the least that
may be drawn. Knows one row; starts nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

# A row of what is asked: 24 int32, of which the first 12 are 6 float64.
ASKED = tl.constexpr(24)
TEMPERATURE, INVERSE, TOP_P, LEAST, DEPTH, UNIFORM = (tl.constexpr(i) for i in range(6))
KIND, TOP_K = tl.constexpr(16), tl.constexpr(17)

# What becomes of a row; the first two are said by whoever asks (KIND).
NOTHING, DRAW = tl.constexpr(0), tl.constexpr(1)
LIKELIEST = tl.constexpr(2)
CUT = tl.constexpr(3)
SEARCH = tl.constexpr(4)
NONE_ALLOWED = tl.constexpr(5)
PAST_RANGE = tl.constexpr(6)

MODE, BEFORE, FOUND = (tl.constexpr(i) for i in range(3))
STATE = tl.constexpr(4)  # int32 of a row between kernels, of which these are the first
LOW_EDGE, HIGH_EDGE = tl.constexpr(0), tl.constexpr(1)
ALL_DEPTHS = tl.constexpr(1073741824.0)  # 2**30
STEP_DEPTHS = tl.constexpr(134217728.0)  # between the 8 depths
LOWEST_KEY = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
HIGHEST_KEY = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def key_of(x, offsets):
    """Numbers whose order, largest first, is (logit descending, id ascending)."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # + 0.0: there is one zero
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ordered.to(tl.int64) * 4294967296 + (4294967295 - offsets.to(tl.int64))


@triton.jit
def span_of(numbers, maxima, minima, row, PIECES: tl.constexpr):
    """A row's largest logit, and depths a logit: down to the least weight that may be drawn, or to
    the smallest logit where that is nearer. `numbers` is what is asked of the row."""
    parts = row * PIECES + tl.arange(0, PIECES)
    largest = tl.max(tl.load(maxima + parts), 0)
    smallest = tl.min(tl.load(minima + parts), 0)
    width = tl.load(numbers + DEPTH) * tl.load(numbers + TEMPERATURE)
    width = tl.minimum(width, largest.to(tl.float64) - smallest.to(tl.float64))
    # A little less than all of them: rounding takes nothing that may be drawn past the last bin.
    scale = 1072693248.0 / tl.maximum(width, 1e-30)
    return largest, tl.minimum(scale, 1e30).to(tl.float32)


@triton.jit
def depth_of(x, largest, scale):
    """Of each logit; ALL_DEPTHS or more if it lies too deep to be drawn. Every kernel's is the
    same."""
    return tl.minimum((largest - x) * scale, 2.0 * ALL_DEPTHS)


@triton.jit
def sharpness_of(inverse):
    """What logits are multiplied with to be exponents of 2. One next to infinity must not become
    it: 0 * infinity is no number."""
    return tl.minimum(inverse * 1.4426950408889634, 1e30).to(tl.float32)


@triton.jit
def weight_of(x, largest, sharpness):
    return tl.exp2((x - largest) * sharpness)


@triton.jit
def sum_of(weights, BLOCK: tl.constexpr):
    """In float64, after four at a time in float32: conversions cost more than sums."""
    return tl.sum(tl.sum(tl.reshape(weights, (BLOCK // 4, 4)), 1).to(tl.float64), 0)


@triton.jit
def middle_of(low, high):
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def walk_block(row, first, vocab, largest, sharpness, least, start, target, BLOCK: tl.constexpr):
    """The token of a block at which the running sum of what is kept, by id, passes the target."""
    ids = first + tl.arange(0, BLOCK)
    x = tl.load(row + ids, mask=ids < vocab, other=float("-inf"))
    weight = weight_of(x, largest, sharpness)
    kept = (ids < vocab) & (weight >= least) & (key_of(x, ids) >= start)
    running = tl.cumsum(tl.where(kept, weight, 0.0).to(tl.float64), 0)
    token = tl.min(tl.where(kept & (running > target), ids, 2147483647), 0)
    # Not passed only by rounding: then it is the last.
    return tl.where(token == 2147483647, tl.max(tl.where(kept, ids, -1), 0), token)
