// Attention over the blocks of a sequence. Included by each path.
//
// Keys of a block lie [head_dim][16 tokens], so sixteen scores grow together without a horizontal
// sum; values lie [16 tokens][head_dim]. Several queries (rows, and heads that share a KV head) go
// through a block together: each key and value is read and widened once for all of them. Scores of
// all seen positions are kept, the softmax is taken over them, and the values are added in the
// order of positions: the same operations for a query, whatever queries are computed with it.
//
// Int8 keys and values are codes with one scale per token. A key's scale multiplies its finished
// score, a value's scale its softmax weight, so codes are widened in registers and nowhere else.
#pragma once

#include <type_traits>
#include <utility>

#include "lanes.h"

namespace headrace {
namespace {

// Independent sums of sixteen floats each: enough to hide the latency of an addition, and no more
// than fit into registers together with their operands.
#if defined(__AVX512F__)
constexpr int SUMS_TOGETHER = 12;
#else
constexpr int SUMS_TOGETHER = 6;
#endif
constexpr int MAX_QUERIES = SUMS_TOGETHER;  // in one pass
constexpr int beside(int queries) {
  return SUMS_TOGETHER / queries < 4 ? SUMS_TOGETHER / queries : 4;
}

template <typename T>
constexpr bool has_scales = std::is_same_v<T, int8_t>;

// The sixteen scales that follow sixteen tokens' codes.
HEADRACE_INLINE uint8_t* scales_of(uint8_t* codes, int head_dim) {
  return codes + static_cast<size_t>(BLOCK_TOKENS) * head_dim;
}
HEADRACE_INLINE Floats load_scales(const int8_t* codes, int head_dim) {
  Floats v;
  read(v, codes + static_cast<size_t>(BLOCK_TOKENS) * head_dim);
  return v;
}

// One head's key or value as codes, `step` apart; gives their scale. What is not finite has no
// codes: its scale is NaN, so that it shows in the result as it would in a wider type.
HEADRACE_INLINE float write_codes(const float* x, int n, int8_t* codes, int step) {
  Floats top = splat(0.0f);
  for (int d = 0; d < n; d += LANES) {
    const Floats v = load_part(x + d, n - d < LANES ? n - d : LANES);
    const Floats size = select(v < splat(0.0f), -v, v);
    top = select(size <= top, top, size);  // keeps a NaN: it is not <= anything
    top = select(top == top, top, splat(INFINITY));
  }
  const float largest = max_lanes(top);
  const bool finite = largest < INFINITY;
  // Below TINY the inverse may overflow, and the values are practically 0.
  constexpr float TINY = 1e-30f;
  const Floats inverse = splat(finite && largest > TINY ? 127.0f / largest : 0.0f);
  for (int d = 0; d < n; d += LANES) {
    const int width = n - d < LANES ? n - d : LANES;
    const Floats v = finite ? load_part(x + d, width) : splat(0.0f);
    int8_t rounded[LANES];
    store_bytes(rounded, to_ints(round_product(v, inverse)));
    for (int i = 0; i < width; ++i) codes[(d + i) * step] = rounded[i];
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
    int d = 0;
    for (; d + PART_LANES <= head_dim; d += PART_LANES) {
      T kept[PART_LANES];
      store_register(kept, load_register(key + d));
      for (int i = 0; i < PART_LANES; ++i) k[(d + i) * BLOCK_TOKENS] = kept[i];
      store_register(v + d, load_register(value + d));
    }
    for (; d < head_dim; ++d) {
      T kept[PART_LANES];
      store_register(kept, splat_register(key[d]));
      k[d * BLOCK_TOKENS] = kept[0];
      store_register(kept, splat_register(value[d]));
      v[d] = kept[0];
    }
  }
}

// The queries of a task, row by row, and the blocks that they see.
struct Span {
  Span(const Attend& a, int first_head, int heads)
      : a(a), heads(heads), count(a.rows * heads), first(a.first(0) / BLOCK_TOKENS),
        end(a.last(a.rows - 1) / BLOCK_TOKENS + 1), queries(a.scratch),
        all_scores(a.scratch + QUERIES_TOGETHER * a.head_dim) {
    for (int q = 0; q < count; ++q) {
      const size_t head = static_cast<size_t>(first_head + q % heads) * a.head_dim;
      const float* query = a.queries + q / heads * a.query_stride + head;
      for (int d = 0; d < a.head_dim; ++d) queries[d * QUERIES_TOGETHER + q] = query[d];
      out[q] = a.out + q / heads * a.out_stride + head;
    }
  }

  const uint8_t* block(int b) const {
    return a.kv + static_cast<size_t>(a.table[b]) * a.block_bytes;
  }
  template <typename T>
  const T* keys(int b) const {
    return reinterpret_cast<const T*>(block(b) + a.key_offset);
  }
  template <typename T>
  const T* values(int b) const {
    return reinterpret_cast<const T*>(block(b) + a.value_offset);
  }
  // Scores of a query in block b; later its weights.
  float* scores(int q, int b) const {
    return all_scores + (static_cast<size_t>(b - first) * QUERIES_TOGETHER + q) * BLOCK_TOKENS;
  }

  const Attend& a;
  int heads;          // of a row
  int count;          // of queries
  int first, end;     // blocks
  // Queries lie beside each other in memory, dimension by dimension, and so do their scores, block
  // by block: an inner loop reaches all of them from one pointer.
  float* queries;     // [head_dim][QUERIES_TOGETHER]
  float* all_scores;  // [blocks][QUERIES_TOGETHER][16]
  float* out[QUERIES_TOGETHER];
};

template <typename F, int... N>
HEADRACE_INLINE void in_pass(int at, int n, F f, std::integer_sequence<int, N...>) {
  (void)((n == N + 1 && (f(at, std::integral_constant<int, N + 1>{}), true)) || ...);
}

// Calls f with a number of queries (a compile-time constant) from `at` on, until all are done. The
// numbers are as even as possible: if 6 fit, 8 is 4 + 4.
template <typename F>
HEADRACE_INLINE void in_passes(int at, int count, F f) {
  for (int passes = (count + MAX_QUERIES - 1) / MAX_QUERIES; passes > 0; --passes) {
    const int n = (count + passes - 1) / passes;
    in_pass(at, n, f, std::make_integer_sequence<int, MAX_QUERIES>{});
    at += n;
    count -= n;
  }
}

// Scores of B blocks from b on, for Q queries from q on.
template <typename T, int Q, int B>
HEADRACE_INLINE void score_blocks(const Span& span, int q, int b) {
  const T* keys[B];
  const float* queries = span.queries + q;
  FloatRegister sums[B][PARTS][Q];
  for (int i = 0; i < B; ++i) keys[i] = span.keys<T>(b + i);
  for (int i = 0; i < B; ++i)
    for (int p = 0; p < PARTS; ++p)
      for (int j = 0; j < Q; ++j) sums[i][p][j] = splat_register(0.0f);
  // Few rows are bound by memory: prefetch their values, and the keys of the next blocks.
  const bool ahead = span.a.is_first && q == 0;
  constexpr int line = 64 / (BLOCK_TOKENS * sizeof(T));  // dimensions in a cache line
  const T* values[B];
  const T* next[B];
  for (int i = 0; i < B; ++i) {
    values[i] = span.values<T>(b + i);
    next[i] = span.keys<T>(b + i + B < span.end ? b + i + B : b + i);
  }
  for (int d = 0; d < span.a.head_dim; ++d) {
    if (ahead && d % line == 0)
      for (int i = 0; i < B; ++i) {
        __builtin_prefetch(next[i] + d * BLOCK_TOKENS, 0, 3);
        __builtin_prefetch(values[i] + d * BLOCK_TOKENS, 0, 2);
      }
    FloatRegister k[B][PARTS];
    for (int i = 0; i < B; ++i)
      for (int p = 0; p < PARTS; ++p)
        k[i][p] = load_register(keys[i] + d * BLOCK_TOKENS + p * PART_LANES);
    for (int j = 0; j < Q; ++j) {
      const FloatRegister x = splat_register(queries[d * QUERIES_TOGETHER + j]);
      for (int i = 0; i < B; ++i)
        for (int p = 0; p < PARTS; ++p) sums[i][p][j] = multiply_add(k[i][p], x, sums[i][p][j]);
    }
  }
  for (int i = 0; i < B; ++i)
    for (int j = 0; j < Q; ++j) {
      float* scores = span.scores(q + j, b + i);
      for (int p = 0; p < PARTS; ++p) store_register(scores + p * PART_LANES, sums[i][p][j]);
      if constexpr (has_scales<T>)
        store(scores, load(scores) * load_scales(keys[i], span.a.head_dim));
    }
}

template <typename T, int Q>
HEADRACE_INLINE void score(const Span& span, int q) {
  constexpr int together = beside(Q);
  int b = span.first;
  for (; b + together <= span.end; b += together) score_blocks<T, Q, together>(span, q, b);
  for (; b < span.end; ++b) score_blocks<T, Q, 1>(span, q, b);
}

// Turns the scores of query q at positions [first, last] into weights, up to a common factor, which is
// returned. The other positions of the same blocks must not be used.
static float weigh(const Span& span, int q, int first, int last) {
  const Floats factor = splat(span.a.scale);
  const float cap = span.a.softcap;
  const int end = last / BLOCK_TOKENS + 1;
  Floats top = splat(-INFINITY);
  for (int b = span.first; b < end; ++b) {
    float* scores = span.scores(q, b);
    Floats s = load(scores) * factor;
    if (cap != 0.0f) s = splat(cap) * hyperbolic_tangent(s * splat(1.0f / cap));
    const int at = b * BLOCK_TOKENS;
    if (at < first || at + BLOCK_TOKENS > last + 1) {
      const Ints position = lane_numbers() + splat(at);
      s = select((position < splat(first)) | (position > splat(last)), splat(-INFINITY), s);
    }
    store(scores, s);
    top = maximum(top, s);
  }
  const Floats shift = splat(max_lanes(top));
  Floats total = splat(0.0f);
  for (int b = span.first; b < end; ++b) {
    // Not 0 where the score is -INFINITY but exp(-87): nothing beside a sum of at least 1.
    const Floats e = exponential(load(span.scores(q, b)) - shift);
    store(span.scores(q, b), e);
    total += e;
  }
  return 1.0f / sum_lanes(total);
}

// Prefetches a part of the next task's first keys, while block b is added here.
template <typename T>
HEADRACE_INLINE void ask_next(const Attend& a, int b, size_t first, size_t values) {
  if (!a.next_table || b < a.next_first || b >= a.next_end) return;
  const uint8_t* keys =
      a.kv + static_cast<size_t>(a.next_table[b]) * a.block_bytes + a.next_key_offset;
  for (size_t at = 0; at < values * sizeof(T); at += 64)
    __builtin_prefetch(keys + first * sizeof(T) + at, 0, 2);
}

// Adds the weighted values of positions [from, to), in order, to the sums of Q queries from q on, for
// C registers of dimensions from d on.
template <typename T, int Q, int C>
HEADRACE_INLINE void add_chunks(const Span& span, int q, int from, int to, int d) {
  const int head_dim = span.a.head_dim;
  FloatRegister sums[Q][C];
  for (int j = 0; j < Q; ++j)
    for (int c = 0; c < C; ++c) sums[j][c] = load_register(span.out[q + j] + d + c * PART_LANES);
  for (int b = from / BLOCK_TOKENS; b * BLOCK_TOKENS < to; ++b) {
    const int origin = b * BLOCK_TOKENS;
    const T* values = span.values<T>(b) + d;
    const float* weights = span.scores(q, b);
    const int end = to - origin < BLOCK_TOKENS ? to - origin : BLOCK_TOKENS;
    for (int t = from > origin ? from - origin : 0; t < end; ++t) {
      if (span.a.next_table)
        ask_next<T>(span.a, b, d * BLOCK_TOKENS + t * C * PART_LANES, C * PART_LANES);
      for (int c = 0; c < C; ++c) {
        const FloatRegister v = load_register(values + t * head_dim + c * PART_LANES);
        for (int j = 0; j < Q; ++j) {
          const FloatRegister weight = splat_register(weights[j * BLOCK_TOKENS + t]);
          sums[j][c] = multiply_add(v, weight, sums[j][c]);
        }
      }
    }
  }
  for (int j = 0; j < Q; ++j)
    for (int c = 0; c < C; ++c) store_register(span.out[q + j] + d + c * PART_LANES, sums[j][c]);
}

// The last dimensions of a head, which do not fill a register: never reads past the last token.
template <typename T>
static void add_last(const Span& span, int q, int from, int to, int d) {
  float sums[PART_LANES] = {}, values[PART_LANES];
  const int width = span.a.head_dim - d;
  std::memcpy(sums, span.out[q] + d, sizeof(float) * width);
  for (int t = from; t < to; ++t) {
    T part[PART_LANES] = {};
    const int b = t / BLOCK_TOKENS, slot = t % BLOCK_TOKENS;
    std::memcpy(part, span.values<T>(b) + slot * span.a.head_dim + d, sizeof(T) * width);
    store_register(values, load_register(part));
    for (int i = 0; i < width; ++i)
      sums[i] = multiply_add(values[i], span.scores(q, b)[slot], sums[i]);
  }
  std::memcpy(span.out[q] + d, sums, sizeof(float) * width);
}

template <typename T, int Q>
HEADRACE_INLINE void add_values(const Span& span, int q, int from, int to) {
  constexpr int chunks = beside(Q) * (PARTS > 1 ? 2 : 1);
  const int head_dim = span.a.head_dim;
  int d = 0;
  for (; d + chunks * PART_LANES <= head_dim; d += chunks * PART_LANES)
    add_chunks<T, Q, chunks>(span, q, from, to, d);
  for (; d + PART_LANES <= head_dim; d += PART_LANES) add_chunks<T, Q, 1>(span, q, from, to, d);
  for (int j = 0; j < Q && d < head_dim; ++j) add_last<T>(span, q + j, from, to, d);
}

template <typename T>
HEADRACE_INLINE void add_values(const Span& span, int q, int count, int from, int to) {
  if (from >= to) return;
  in_passes(q, count, [&](int at, auto n) { add_values<T, decltype(n)::value>(span, at, from, to); });
}

// Int8: multiplies each weight by its value's scale. Scales of positions that are not seen may belong
// to another sequence: their products are never used.
HEADRACE_INLINE void scale_weights(const Span& span) {
  for (int b = span.first; b < span.end; ++b) {
    const Floats scales = load_scales(span.values<int8_t>(b), span.a.head_dim);
    for (int q = 0; q < span.count; ++q) {
      float* weights = span.scores(q, b);
      store(weights, load(weights) * scales);
    }
  }
}

template <typename T>
HEADRACE_INLINE void attend_span(const Span& span) {
  const Attend& a = span.a;
  in_passes(0, span.count, [&](int at, auto n) { score<T, decltype(n)::value>(span, at); });
  float factors[QUERIES_TOGETHER];
  for (int q = 0; q < span.count; ++q) {
    const int row = q / span.heads;
    factors[q] = weigh(span, q, a.first(row), a.last(row));
    std::memset(span.out[q], 0, sizeof(float) * a.head_dim);
  }
  if constexpr (has_scales<T>) scale_weights(span);
  // Positions that only some rows see, at either end, are added row by row: a weight of 0 would not
  // keep out a NaN.
  const int from = a.first(a.rows - 1), to = a.last(0) + 1;
  if (from < to) {
    for (int r = 0; r < a.rows; ++r)
      add_values<T>(span, r * span.heads, span.heads, a.first(r), from);
    add_values<T>(span, 0, span.count, from, to);
    for (int r = 1; r < a.rows; ++r)
      add_values<T>(span, r * span.heads, span.heads, to, a.last(r) + 1);
  } else {
    for (int r = 0; r < a.rows; ++r)
      add_values<T>(span, r * span.heads, span.heads, a.first(r), a.last(r) + 1);
  }
  for (int q = 0; q < span.count; ++q)
    for (int d = 0; d < a.head_dim; ++d) span.out[q][d] *= factors[q];
}

template <typename T>
static void attend(const Attend& a) {
  for (int head = 0; head < a.group; head += QUERIES_TOGETHER) {
    const int left = a.group - head;
    attend_span<T>(Span(a, head, left < QUERIES_TOGETHER ? left : QUERIES_TOGETHER));
  }
}

}  // namespace
}  // namespace headrace
