// Loops that do one thing only, for measuring what a core can do at most (peaks.cpp). Included by
// each path.
#pragma once

#include "tile.h"

namespace headrace {
namespace {

// The compiler must believe that a register has changed, and so may not work ahead of the loop.
#if defined(__AVX512F__)
#define HEADRACE_CHANGED(v) asm volatile("" : "+v"(v))
#elif defined(__x86_64__)
#define HEADRACE_CHANGED(v) asm volatile("" : "+x"(v))
#else
#define HEADRACE_CHANGED(v) asm volatile("" : "+m"(v))
#endif

#if defined(__AVX2__)
#define HEADRACE_CHANGED_CODES(v) HEADRACE_CHANGED(v)
#else
#define HEADRACE_CHANGED_CODES(v) asm volatile("" : "+m"(v))  // arrays
#endif

HEADRACE_INLINE void change(FloatRegister& v) { HEADRACE_CHANGED(v); }
template <typename V>
HEADRACE_INLINE void change(Pair<V>& v) {
  change(v.low);
  change(v.high);
}

// Int8 products with nothing around them; how many multiply-adds were made.
static int64_t dot_loop(int rounds) {
  constexpr int R = Unit::outputs == LANES ? 6 : 3;  // as many sums as a tile keeps in registers
  typename Unit::Sums sums[2][R];
  typename Unit::Codes w[2], a[R];
  const uint8_t codes[64] = {1, 2, 3};
  const int8_t fours[4] = {1, -2, 3, -4};
  for (auto& v : w) v = Unit::codes8(codes);
  for (auto& v : a) v = Unit::same4(fours);
  for (auto& row : sums)
    for (auto& sum : row) sum = Unit::start(0);
  for (int i = 0; i < rounds; ++i) {
    for (auto& v : a) HEADRACE_CHANGED_CODES(v);
    for (int u = 0; u < 2; ++u)
      for (int r = 0; r < R; ++r) sums[u][r] = Unit::dot(sums[u][r], w[u], a[r]);
  }
  for (auto& row : sums)
    for (auto& sum : row) HEADRACE_CHANGED_CODES(sum);
  return static_cast<int64_t>(rounds) * 2 * R * Unit::outputs * 4;
}

static int64_t float_loop(int rounds) {
  constexpr int sums_together = REGISTER_BYTES == 64 ? 12 : REGISTER_BYTES == 32 ? 6 : 3;
  Floats sums[sums_together];
  Floats x = splat(1.0f), y = splat(1e-6f);
  for (auto& sum : sums) sum = splat(0.0f);
  for (int i = 0; i < rounds; ++i) {
    change(x);
    for (auto& sum : sums) sum = multiply_add(x, y, sum);
  }
  for (auto& sum : sums) change(sum);
  return static_cast<int64_t>(rounds) * sums_together * LANES;
}

// Reads as a product of one row does: four streams, each asked for ahead.
static void read_loop(const uint8_t* data, size_t bytes) {
  const size_t quarter = bytes / 4 / 64 * 64;
  for (size_t at = 0; at < quarter; at += 64)
    for (int s = 0; s < 4; ++s) {
      const uint8_t* p = data + s * quarter + at;
      __builtin_prefetch(p + 2048, 0, 3);
      Floats v;
      std::memcpy(&v, p, sizeof v);
      change(v);
    }
}

#undef HEADRACE_CHANGED
#undef HEADRACE_CHANGED_CODES

}  // namespace
}  // namespace headrace
