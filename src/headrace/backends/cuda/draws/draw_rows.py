"""What the drawing kernels share: a row's parameters and state, and a token's key, depth and
weight.

A token's depth is how far its logit is below the largest, in 2**30 steps down to the lowest that
may be drawn. Knows one row; launches nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.backends.cuda.draws import draw_sizes

# A row of parameters: 24 int32, of which the first 12 are 6 float64.
ASKED = tl.constexpr(draw_sizes.ASKED)
TEMPERATURE, INVERSE, TOP_P, LEAST, DEPTH, UNIFORM = (tl.constexpr(i) for i in range(6))
KIND, TOP_K = tl.constexpr(16), tl.constexpr(17)

# The state of a row; its parameters (KIND) start it with one of the first two.
NOTHING, DRAW = tl.constexpr(0), tl.constexpr(1)
LIKELIEST = tl.constexpr(2)
CUT = tl.constexpr(3)
SEARCH = tl.constexpr(4)
NONE_ALLOWED = tl.constexpr(5)
PAST_RANGE = tl.constexpr(6)

MODE, BEFORE, FOUND = (tl.constexpr(i) for i in range(3))
STATE = tl.constexpr(draw_sizes.STATE)  # of a row between kernels; these are the first of it
LOW_EDGE, HIGH_EDGE = tl.constexpr(0), tl.constexpr(1)
ALL_DEPTHS = tl.constexpr(1073741824.0)  # 2**30
STEP_DEPTHS = tl.constexpr(134217728.0)  # between the 8 depths
LOWEST_KEY = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
HIGHEST_KEY = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def key_of(x, offsets):
    """Integers whose descending order is (logit descending, id ascending)."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # + 0.0: turns -0.0 into 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ordered.to(tl.int64) * 4294967296 + (4294967295 - offsets.to(tl.int64))


@triton.jit
def span_of(numbers, maxima, minima, row, PIECES: tl.constexpr):
    """A row's largest logit, and the number of depths per unit of logit: down to the lowest weight
    that may be drawn, or to the smallest logit if that is closer. `numbers` are the row's
    parameters."""
    parts = row * PIECES + tl.arange(0, PIECES)
    largest = tl.max(tl.load(maxima + parts), 0)
    smallest = tl.min(tl.load(minima + parts), 0)
    width = tl.load(numbers + DEPTH) * tl.load(numbers + TEMPERATURE)
    width = tl.minimum(width, largest.to(tl.float64) - smallest.to(tl.float64))
    # Slightly less than ALL_DEPTHS, so that rounding moves no drawable token past the last bin.
    scale = 1072693248.0 / tl.maximum(width, 1e-30)
    return largest, tl.minimum(scale, 1e30).to(tl.float32)


@triton.jit
def depth_of(x, largest, scale):
    """The depth of each logit; ALL_DEPTHS or more if it is too low to be drawn. The same in every
    kernel."""
    return tl.minimum((largest - x) * scale, 2.0 * ALL_DEPTHS)


@triton.jit
def sharpness_of(inverse):
    """The factor that turns logits into exponents of 2. Kept finite: 0 * infinity is NaN."""
    return tl.minimum(inverse * 1.4426950408889634, 1e30).to(tl.float32)


@triton.jit
def weight_of(x, largest, sharpness):
    return tl.exp2((x - largest) * sharpness)


@triton.jit
def sum_of(weights, BLOCK: tl.constexpr):
    """Sums four at a time in float32, then in float64: conversions cost more than sums."""
    return tl.sum(tl.sum(tl.reshape(weights, (BLOCK // 4, 4)), 1).to(tl.float64), 0)


@triton.jit
def middle_of(low, high):
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def walk_block(row, first, vocab, largest, sharpness, least, start, target, BLOCK: tl.constexpr):
    """The token of a block at which the running sum of kept weights, by id, exceeds the target."""
    ids = first + tl.arange(0, BLOCK)
    x = tl.load(row + ids, mask=ids < vocab, other=float("-inf"))
    weight = weight_of(x, largest, sharpness)
    kept = (ids < vocab) & (weight >= least) & (key_of(x, ids) >= start)
    running = tl.cumsum(tl.where(kept, weight, 0.0).to(tl.float64), 0)
    token = tl.min(tl.where(kept & (running > target), ids, 2147483647), 0)
    # If rounding keeps the sum below the target, it is the last kept token.
    return tl.where(token == 2147483647, tl.max(tl.where(kept, ids, -1), 0), token)
