// Activations to int8, per 32 inputs, laid out for a tile (kernels.h). Included by each path.
#pragma once

#include "lanes.h"

namespace headrace {
namespace {

// One group of 32 values (two vectors) of row r in a tile of `rows` rows.
HEADRACE_INLINE void quantize_group(Floats a, Floats b, int r, int rows, uint8_t* group) {
  // Magnitudes compare like their bits, and a NaN's bits are above all others: a NaN becomes the
  // group's scale, and so shows in the product.
  const Ints magnitude = splat(0x7fffffff);
  const int32_t top_bits =
      max_lanes(maximum(as_bits(a) & magnitude, as_bits(b) & magnitude));
  float top;
  std::memcpy(&top, &top_bits, 4);
  const float scale = top / 127.0f;
  const Floats inverse = splat(top > 0.0f ? 127.0f / top : 0.0f);
  const Ints codes_a = to_ints(round_product(a, inverse));
  const Ints codes_b = to_ints(round_product(b, inverse));
  int8_t* codes = reinterpret_cast<int8_t*>(group) + r * QUANTIZED_GROUP;
  store_bytes(codes, codes_a);
  store_bytes(codes + LANES, codes_b);
  const int32_t first = sum_lanes(codes_a);
  const int32_t sum = sum_lanes(codes_a + codes_b);
  const float scaled = scale * static_cast<float>(sum);
  uint8_t* facts = group + rows * QUANTIZED_GROUP;
  std::memcpy(facts + 4 * r, &scale, 4);
  std::memcpy(facts + 4 * (rows + r), &scaled, 4);
  std::memcpy(facts + 4 * (2 * rows + r), &sum, 4);
  std::memcpy(facts + 4 * (3 * rows + r), &first, 4);
}

static void quantize(const float* x, size_t stride, int rows, int inputs, uint8_t* out) {
  const int groups = padded_inputs(inputs) / QUANTIZED_GROUP;
  for (int r = 0; r < rows; ++r) {
    const float* row = x + r * stride;
    for (int g = 0; g < groups; ++g) {
      const int k = g * QUANTIZED_GROUP;
      Floats a = splat(0.0f), b = splat(0.0f);
      if (k + QUANTIZED_GROUP <= inputs) {
        a = load(row + k);
        b = load(row + k + LANES);
      } else if (k < inputs) {
        const int left = inputs - k;
        a = load_part(row + k, left < LANES ? left : LANES);
        if (left > LANES) b = load_part(row + k + LANES, left - LANES);
      }
      quantize_group(a, b, r, rows, out + static_cast<size_t>(g) * rows * QUANTIZED_BYTES);
    }
  }
}

}  // namespace
}  // namespace headrace
