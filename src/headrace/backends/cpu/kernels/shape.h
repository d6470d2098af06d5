// What tiles of every kind share: where codes and factors lie in a record and in a group of quantized
// rows, and how sums become outputs. Included by each path.
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
  // A register's share of 32 inputs when unpacked: codes at a byte each, factors as floats.
  static constexpr int unpacked_bytes = 512 + 64 * (minimum ? 2 : 1);
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

HEADRACE_INLINE void ask_ahead(const Tile& t, int b, int record) {
  const uint8_t* p = t.ahead[b] + static_cast<size_t>(record) * t.ahead_lines * 64;
  for (int line = 0; line < t.ahead_lines; ++line) __builtin_prefetch(p + line * 64, 0, 3);
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

}  // namespace
}  // namespace headrace
