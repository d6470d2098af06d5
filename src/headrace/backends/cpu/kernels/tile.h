// What the tiles of all paths share: the shape of a record by kind, and the tables of tiles.
//
// A path defines, before including this, a template
//   template <Kind K, int B, int R> static void tile(const Tile&);
// for quantized and float kinds alike. Included by each path.
#pragma once

#include "lanes.h"

namespace headrace {
namespace {

template <Kind K>
struct Shape {
  static constexpr bool four_bits = K == Kind::U4Zero || K == Kind::U4Minimum;
  static constexpr bool minimum = K == Kind::U4Minimum || K == Kind::U8Minimum;
  static constexpr int groups = K == Kind::U8Zero16 ? 2 : 1;  // in 32 inputs
  static constexpr int half_codes = four_bits ? 256 : 512;    // bytes of codes in 32 inputs
  static constexpr int scales_at = 2 * half_codes;
  static constexpr int scales_bytes = 2 * groups * LANES * 2;
  static constexpr int record_bytes = scales_at + scales_bytes * (minimum ? 2 : 1);
};

// The facts that follow a group's codes (kernels.h).
template <int R>
struct Group {
  const int8_t* codes;
  const float* scales;
  const float* scaled_sums;
  const int32_t* sums;
  const int32_t* first_sums;

  explicit Group(const uint8_t* p)
      : codes(reinterpret_cast<const int8_t*>(p)),
        scales(reinterpret_cast<const float*>(p + R * QUANTIZED_GROUP)),
        scaled_sums(scales + R),
        sums(reinterpret_cast<const int32_t*>(scales + 2 * R)),
        first_sums(sums + R) {}

  // Sum of the codes that share scale g.
  template <Kind K>
  int32_t sum(int r, int g) const {
    if (Shape<K>::groups == 1) return sums[r];
    return g == 0 ? first_sums[r] : sums[r] - first_sums[r];
  }
};

template <Kind K>
HEADRACE_INLINE Floats load_weights(const uint8_t* p) {
  if constexpr (K == Kind::F32) return load(reinterpret_cast<const float*>(p));
  if constexpr (K == Kind::F16) return load_half(reinterpret_cast<const uint16_t*>(p));
  if constexpr (K == Kind::BF16) return load_bfloat(reinterpret_cast<const uint16_t*>(p));
}

template <Kind K>
constexpr int weight_bytes() {
  return K == Kind::F32 ? 4 : 2;
}

HEADRACE_INLINE void store_outputs(const Tile& t, int b, int r, Floats sums) {
  const size_t at = r * t.out_stride;
  const int n = t.lanes[b];
  if (n == LANES) {
    if (t.bias[b]) sums = sums + load(t.bias[b]);
    if (t.added[b]) sums = load(t.added[b] + at) + sums;
    store(t.out[b] + at, sums);
  } else {
    if (t.bias[b]) sums = sums + load_part(t.bias[b], n);
    if (t.added[b]) sums = load_part(t.added[b] + at, n) + sums;
    store_part(t.out[b] + at, sums, n);
  }
}

// The first level of cache for what a stream reads next, the second for what may wait for a while.
template <int B, int R>
HEADRACE_INLINE void ask_ahead(const Tile& t, int b, int record) {
  const uint8_t* p = t.ahead[b] + static_cast<size_t>(record) * t.ahead_lines * 64;
  for (int line = 0; line < t.ahead_lines; ++line) __builtin_prefetch(p + line * 64, 0, B > 2 ? 3 : 2);
}

// Float kinds: [inputs][16] weights, one multiply-add an input.
template <Kind K, int B, int R>
HEADRACE_INLINE void float_tile(const Tile& t) {
  Floats sums[B][R];
  for (int b = 0; b < B; ++b)
    for (int r = 0; r < R; ++r) sums[b][r] = splat(0.0f);
  for (int k = 0; k < t.inputs; ++k) {
    Floats w[B];
    for (int b = 0; b < B; ++b)
      w[b] = load_weights<K>(t.streams[b] + static_cast<size_t>(k) * LANES * weight_bytes<K>());
    for (int r = 0; r < R; ++r) {
      const Floats x = splat(t.floats[r * t.floats_stride + k]);
      for (int b = 0; b < B; ++b) sums[b][r] = multiply_add(w[b], x, sums[b][r]);
    }
  }
  for (int b = 0; b < B; ++b)
    for (int r = 0; r < R; ++r) store_outputs(t, b, r, sums[b][r]);
}

}  // namespace
}  // namespace headrace
