// Activations to int8, per 32 inputs, laid out for a tile (kernels.h). Included by each path.
#pragma once

#include "lanes.h"

namespace headrace {
namespace {

// One group of 32 values (two vectors) of row r in a tile of `rows` rows.
HEADRACE_INLINE void quantize_group(Floats a, Floats b, int r, int rows, uint8_t* group) {
  const Floats magnitudes = maximum(maximum(a, -a), maximum(b, -b));
  const float top = max_lanes(magnitudes);
  const float scale = top / 127.0f;
  const Floats inverse = splat(top > 0.0f ? 127.0f / top : 0.0f);
  // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, ties to even.
  const Floats shifter = splat(12582912.0f);
  const Ints qa = __builtin_convertvector((a * inverse + shifter) - shifter, Ints);
  const Ints qb = __builtin_convertvector((b * inverse + shifter) - shifter, Ints);
  int8_t* codes = reinterpret_cast<int8_t*>(group) + r * QUANTIZED_GROUP;
  int32_t first = 0, second = 0;
  int32_t ia[16], ib[16];
  std::memcpy(ia, &qa, sizeof ia);
  std::memcpy(ib, &qb, sizeof ib);
  for (int i = 0; i < LANES; ++i) {
    codes[i] = static_cast<int8_t>(ia[i]);
    codes[i + LANES] = static_cast<int8_t>(ib[i]);
    first += ia[i];
    second += ib[i];
  }
  uint8_t* facts = group + rows * QUANTIZED_GROUP;
  const int32_t sum = first + second;
  const float scaled = scale * static_cast<float>(sum);
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
