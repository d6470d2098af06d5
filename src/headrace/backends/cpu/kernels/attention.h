// Attention of one row over the blocks of its sequence. Included by each path.
//
// Keys of a block lie [head_dim][16 tokens], so sixteen scores grow together without a horizontal
// sum; values lie [16 tokens][head_dim]. Scores of all seen positions are kept, the softmax is
// taken over them, and the values are added in the order of positions: the same operations for a
// row whatever chunk it came in.
#pragma once

#include "lanes.h"

namespace headrace {
namespace {

constexpr int BLOCK_TOKENS = LANES;

HEADRACE_INLINE Floats load_kv(const float* p) { return load(p); }
HEADRACE_INLINE Floats load_kv(const uint16_t* p) { return load_half(p); }
HEADRACE_INLINE void store_kv(float* p, float v) { *p = v; }
HEADRACE_INLINE void store_kv(uint16_t* p, float v) { *p = to_half(v); }

template <typename T>
static void write_kv(const float* key, const float* value, int head_dim, int slot, uint8_t* keys,
                     uint8_t* values) {
  T* k = reinterpret_cast<T*>(keys) + slot;
  T* v = reinterpret_cast<T*>(values) + slot * head_dim;
  for (int d = 0; d < head_dim; ++d) {
    store_kv(k + d * BLOCK_TOKENS, key[d]);
    store_kv(v + d, value[d]);
  }
}

// Scores of one block for G query heads. Four partial sums a head hide the latency of additions.
template <typename T, int G>
HEADRACE_INLINE void score_block(const T* keys, const float* queries, int head_dim, float* scores,
                                 size_t stride) {
  Floats sums[G][2];
  for (int g = 0; g < G; ++g) sums[g][0] = sums[g][1] = splat(0.0f);
  int d = 0;
  for (; d + 2 <= head_dim; d += 2) {
    const Floats even = load_kv(keys + d * BLOCK_TOKENS);
    const Floats odd = load_kv(keys + (d + 1) * BLOCK_TOKENS);
    for (int g = 0; g < G; ++g) {
      sums[g][0] += even * splat(queries[g * head_dim + d]);
      sums[g][1] += odd * splat(queries[g * head_dim + d + 1]);
    }
  }
  if (d < head_dim) {
    const Floats even = load_kv(keys + d * BLOCK_TOKENS);
    for (int g = 0; g < G; ++g) sums[g][0] += even * splat(queries[g * head_dim + d]);
  }
  for (int g = 0; g < G; ++g) store(scores + g * stride, sums[g][0] + sums[g][1]);
}

// Adds one block's values, weighted, to 16 of the head's dimensions for G heads.
template <typename T, int G>
HEADRACE_INLINE void add_values(const T* values, const float* weights, size_t stride, int from,
                                int to, int head_dim, int width, float* out) {
  Floats sums[G];
  for (int g = 0; g < G; ++g) sums[g] = load_part(out + g * head_dim, width);
  for (int t = from; t < to; ++t) {
    Floats v;
    if (width == LANES) {
      v = load_kv(values + t * head_dim);
    } else {  // a head that is not a multiple of 16: do not read past the last token
      T part[LANES] = {};
      std::memcpy(part, values + t * head_dim, sizeof(T) * static_cast<size_t>(width));
      v = load_kv(part);
    }
    for (int g = 0; g < G; ++g) sums[g] += v * splat(weights[g * stride + t]);
  }
  for (int g = 0; g < G; ++g) store_part(out + g * head_dim, sums[g], width);
}

static void softmax_scores(float* scores, int n, int first, int last, float scale, float cap) {
  const Floats factor = splat(scale);
  Floats top = splat(-INFINITY);
  for (int i = 0; i < n; i += LANES) {
    Floats s = load(scores + i) * factor;
    if (cap != 0.0f) s = splat(cap) * hyperbolic_tangent(s * splat(1.0f / cap));
    const Ints position = lane_numbers() + i;
    s = (position < first) | (position > last) ? splat(-INFINITY) : s;
    store(scores + i, s);
    top = maximum(top, s);
  }
  const Floats shift = splat(max_lanes(top));
  Floats total = splat(0.0f);
  for (int i = 0; i < n; i += LANES) {
    const Floats s = load(scores + i);
    const Floats e = s == splat(-INFINITY) ? splat(0.0f) : exponential(s - shift);
    store(scores + i, e);
    total += e;
  }
  const Floats inverse = splat(1.0f / sum_lanes(total));
  for (int i = 0; i < n; i += LANES) store(scores + i, load(scores + i) * inverse);
}

template <typename T, int G>
HEADRACE_INLINE void attend_heads(const Attend& a, const float* queries, float* out) {
  const int from_block = a.first / BLOCK_TOKENS, to_block = a.last / BLOCK_TOKENS + 1;
  const int origin = from_block * BLOCK_TOKENS;
  const int n = (to_block - from_block) * BLOCK_TOKENS;
  const size_t stride = static_cast<size_t>(n);
  for (int b = from_block; b < to_block; ++b) {
    const uint8_t* block = a.kv + static_cast<size_t>(a.table[b]) * a.block_bytes;
    score_block<T, G>(reinterpret_cast<const T*>(block + a.key_offset), queries, a.head_dim,
                      a.scratch + (b - from_block) * BLOCK_TOKENS, stride);
  }
  for (int g = 0; g < G; ++g)
    softmax_scores(a.scratch + g * stride, n, a.first - origin, a.last - origin, a.scale,
                   a.softcap);
  std::memset(out, 0, sizeof(float) * static_cast<size_t>(G * a.head_dim));
  for (int b = from_block; b < to_block; ++b) {
    const uint8_t* block = a.kv + static_cast<size_t>(a.table[b]) * a.block_bytes;
    const T* values = reinterpret_cast<const T*>(block + a.value_offset);
    const int start = b * BLOCK_TOKENS;
    const int from = a.first > start ? a.first - start : 0;
    const int to = a.last - start + 1 < BLOCK_TOKENS ? a.last - start + 1 : BLOCK_TOKENS;
    const float* weights = a.scratch + (b - from_block) * BLOCK_TOKENS;
    for (int d = 0; d < a.head_dim; d += LANES) {
      const int width = a.head_dim - d < LANES ? a.head_dim - d : LANES;
      add_values<T, G>(values + d, weights, stride, from, to, a.head_dim, width, out + d);
    }
  }
}

template <typename T>
static void attend(const Attend& a) {
  int g = 0;
  for (; g + 4 <= a.group; g += 4)
    attend_heads<T, 4>(a, a.queries + g * a.head_dim, a.out + g * a.head_dim);
  const float* queries = a.queries + g * a.head_dim;
  float* out = a.out + g * a.head_dim;
  switch (a.group - g) {
    case 3: attend_heads<T, 3>(a, queries, out); break;
    case 2: attend_heads<T, 2>(a, queries, out); break;
    case 1: attend_heads<T, 1>(a, queries, out); break;
    default: break;
  }
}

}  // namespace
}  // namespace headrace
