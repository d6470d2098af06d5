// Attention of one row over the blocks of its sequence. Included by each path.
//
// Keys of a block lie [head_dim][16 tokens], so sixteen scores grow together without a horizontal
// sum; values lie [16 tokens][head_dim]. Scores of all seen positions are kept, the softmax is
// taken over them, and the values are added in the order of positions: the same operations for a
// row whatever chunk it came in.
//
// Int8 keys and values are codes with one scale a token. A key's scale multiplies its finished
// score, a value's scale its softmax weight, so codes are widened in registers and nowhere else.
#pragma once

#include <type_traits>

#include "lanes.h"

namespace headrace {
namespace {

// Of 16 dimensions each: as many sums as the registers hold, for up to four heads.
#if defined(__AVX512F__)
constexpr int CHUNKS_TOGETHER = 4;
#else
constexpr int CHUNKS_TOGETHER = 1;
#endif

struct Half {
  uint16_t bits;
};
struct Bfloat {
  uint16_t bits;
};

HEADRACE_INLINE Floats load_kv(const float* p) { return load(p); }
HEADRACE_INLINE Floats load_kv(const Half* p) { return load_half(&p->bits); }
HEADRACE_INLINE Floats load_kv(const Bfloat* p) { return load_bfloat(&p->bits); }
HEADRACE_INLINE Floats load_kv(const int8_t* p) { return load_bytes(p); }
HEADRACE_INLINE void store_kv(float* p, float v) { *p = v; }
HEADRACE_INLINE void store_kv(Half* p, float v) { p->bits = to_half(v); }
HEADRACE_INLINE void store_kv(Bfloat* p, float v) { p->bits = to_bfloat(v); }

template <typename T>
constexpr bool has_scales = std::is_same_v<T, int8_t>;

// The sixteen scales that follow sixteen tokens' codes.
HEADRACE_INLINE uint8_t* scales_of(uint8_t* codes, int head_dim) {
  return codes + static_cast<size_t>(BLOCK_TOKENS) * head_dim;
}
HEADRACE_INLINE Floats load_scales(const int8_t* codes, int head_dim) {
  Floats v;
  std::memcpy(&v, codes + static_cast<size_t>(BLOCK_TOKENS) * head_dim, sizeof v);
  return v;
}

// One head's key or value as codes, `step` apart; gives their scale. What is not finite has no
// codes: its scale is NaN, so that it shows in the result as it would in a wider type.
HEADRACE_INLINE float write_codes(const float* x, int n, int8_t* codes, int step) {
  Floats top = splat(0.0f);
  for (int d = 0; d < n; d += LANES) {
    const Floats v = load_part(x + d, n - d < LANES ? n - d : LANES);
    const Floats size = v < splat(0.0f) ? -v : v;
    top = size <= top ? top : size;  // keeps a NaN: it is not <= anything
    top = top == top ? top : splat(INFINITY);
  }
  const float largest = max_lanes(top);
  const bool finite = largest < INFINITY;
  // Below TINY the inverse may overflow, and nobody can tell the values from 0.
  constexpr float TINY = 1e-30f;
  const Floats inverse = splat(finite && largest > TINY ? 127.0f / largest : 0.0f);
  // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, ties to even.
  const Floats shifter = splat(12582912.0f);
  for (int d = 0; d < n; d += LANES) {
    const int width = n - d < LANES ? n - d : LANES;
    const Floats v = finite ? load_part(x + d, width) : splat(0.0f);
    const Ints rounded = __builtin_convertvector((v * inverse + shifter) - shifter, Ints);
    for (int i = 0; i < width; ++i) codes[(d + i) * step] = static_cast<int8_t>(rounded[i]);
  }
  return finite ? largest / 127.0f : NAN;
}

template <typename T>
static void write_kv(const float* key, const float* value, int head_dim, int slot, uint8_t* keys,
                     uint8_t* values) {
  T* k = reinterpret_cast<T*>(keys) + slot;
  T* v = reinterpret_cast<T*>(values) + slot * head_dim;
  if constexpr (has_scales<T>) {
    const float key_scale = write_codes(key, head_dim, k, BLOCK_TOKENS);
    const float value_scale = write_codes(value, head_dim, v, 1);
    std::memcpy(scales_of(keys, head_dim) + slot * sizeof(float), &key_scale, sizeof(float));
    std::memcpy(scales_of(values, head_dim) + slot * sizeof(float), &value_scale, sizeof(float));
  } else {
    for (int d = 0; d < head_dim; ++d) {
      store_kv(k + d * BLOCK_TOKENS, key[d]);
      store_kv(v + d, value[d]);
    }
  }
}

// Scores of one block for G query heads. Two partial sums a head hide the latency of additions.
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
  for (int g = 0; g < G; ++g) {
    Floats sum = sums[g][0] + sums[g][1];
    if constexpr (has_scales<T>) sum *= load_scales(keys, head_dim);
    store(scores + g * stride, sum);
  }
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
    const Floats below = s - shift;  // exponential() would lose a NaN
    Floats e = below == below ? exponential(below) : below;
    e = s == splat(-INFINITY) ? splat(0.0f) : e;
    store(scores + i, e);
    total += e;
  }
  const Floats inverse = splat(1.0f / sum_lanes(total));
  for (int i = 0; i < n; i += LANES) store(scores + i, load(scores + i) * inverse);
}

// The blocks that a row sees, and where its weights (or scores) of one block lie.
struct Span {
  explicit Span(const Attend& a)
      : a(a), first(a.first / BLOCK_TOKENS), end(a.last / BLOCK_TOKENS + 1),
        positions((end - first) * BLOCK_TOKENS), stride(static_cast<size_t>(positions)) {}

  const uint8_t* block(int b) const {
    return a.kv + static_cast<size_t>(a.table[b]) * a.block_bytes;
  }
  float* weights(int b) const { return a.scratch + (b - first) * BLOCK_TOKENS; }
  int from(int b) const { return a.first > b * BLOCK_TOKENS ? a.first - b * BLOCK_TOKENS : 0; }
  int to(int b) const {
    const int left = a.last + 1 - b * BLOCK_TOKENS;
    return left < BLOCK_TOKENS ? left : BLOCK_TOKENS;
  }

  const Attend& a;
  int first, end;   // blocks
  int positions;    // of those blocks
  size_t stride;    // floats from a head's scores to the next one's
};

// Weighted values of all positions, in their order, for G heads and C times 16 of the dimensions:
// so many sums grow at once that none waits for its last addition.
template <typename T, int G, int C>
HEADRACE_INLINE void add_values(const Span& span, int d, float* out) {
  const Attend& a = span.a;
  Floats sums[G][C];
  for (int g = 0; g < G; ++g)
    for (int c = 0; c < C; ++c) sums[g][c] = splat(0.0f);
  for (int b = span.first; b < span.end; ++b) {
    const T* values = reinterpret_cast<const T*>(span.block(b) + a.value_offset) + d;
    const float* weights = span.weights(b);
    const int to = span.to(b);
    for (int t = span.from(b); t < to; ++t)
      for (int c = 0; c < C; ++c) {
        const Floats v = load_kv(values + t * a.head_dim + c * LANES);
        for (int g = 0; g < G; ++g) sums[g][c] += v * splat(weights[g * span.stride + t]);
      }
  }
  for (int g = 0; g < G; ++g)
    for (int c = 0; c < C; ++c) store(out + g * a.head_dim + d + c * LANES, sums[g][c]);
}

// The last dimensions of a head that is not a multiple of 16: never reads past the last token.
template <typename T, int G>
HEADRACE_INLINE void add_last_values(const Span& span, int d, float* out) {
  const Attend& a = span.a;
  const int width = a.head_dim - d;
  Floats sums[G];
  for (int g = 0; g < G; ++g) sums[g] = splat(0.0f);
  for (int b = span.first; b < span.end; ++b) {
    const T* values = reinterpret_cast<const T*>(span.block(b) + a.value_offset) + d;
    const int to = span.to(b);
    for (int t = span.from(b); t < to; ++t) {
      T part[LANES] = {};
      std::memcpy(part, values + t * a.head_dim, sizeof(T) * static_cast<size_t>(width));
      const Floats v = load_kv(part);
      for (int g = 0; g < G; ++g) sums[g] += v * splat(span.weights(b)[g * span.stride + t]);
    }
  }
  for (int g = 0; g < G; ++g) store_part(out + g * a.head_dim + d, sums[g], width);
}

template <typename T, int G>
HEADRACE_INLINE void attend_heads(const Attend& a, const float* queries, float* out) {
  const Span span(a);
  for (int b = span.first; b < span.end; ++b)
    score_block<T, G>(reinterpret_cast<const T*>(span.block(b) + a.key_offset), queries,
                      a.head_dim, span.weights(b), span.stride);
  const int origin = span.first * BLOCK_TOKENS;
  for (int g = 0; g < G; ++g)
    softmax_scores(a.scratch + g * span.stride, span.positions, a.first - origin, a.last - origin,
                   a.scale, a.softcap);
  if constexpr (has_scales<T>)
    for (int b = span.first; b < span.end; ++b) {
      // Those outside from..to may be another sequence's: their products are never used.
      const Floats scales = load_scales(
          reinterpret_cast<const T*>(span.block(b) + a.value_offset), a.head_dim);
      for (int g = 0; g < G; ++g) {
        float* weights = span.weights(b) + g * span.stride;
        store(weights, load(weights) * scales);
      }
    }
  int d = 0;
  for (; d + CHUNKS_TOGETHER * LANES <= a.head_dim; d += CHUNKS_TOGETHER * LANES)
    add_values<T, G, CHUNKS_TOGETHER>(span, d, out);
  for (; d + LANES <= a.head_dim; d += LANES) add_values<T, G, 1>(span, d, out);
  if (d < a.head_dim) add_last_values<T, G>(span, d, out);
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
