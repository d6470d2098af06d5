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
#elif defined(__aarch64__)
#define HEADRACE_CHANGED(v) asm volatile("" : "+w"(v))
#else
#define HEADRACE_CHANGED(v) asm volatile("" : "+m"(v))
#endif
// The portable path's sums and codes are arrays.
#if defined(__AVX2__) || defined(HEADRACE_NEON)
#define HEADRACE_CHANGED_UNIT(v) HEADRACE_CHANGED(v)
#else
#define HEADRACE_CHANGED_UNIT(v) asm volatile("" : "+m"(v))
#endif

// Int8 products with nothing around them; how many multiply-adds were made. Twelve sums: none waits
// for its last addition.
static int64_t dot_loop(int rounds) {
  using Sums = typename Unit::Sums;
  const uint8_t codes[64] = {1, 2, 3};
  const int8_t fours[4] = {1, -2, 3, -4};
  const auto w = Unit::codes8(codes);
  auto a = Unit::same4(fours);
  Sums s0 = Unit::start(0), s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0, s7 = s0, s8 = s0,
       s9 = s0, s10 = s0, s11 = s0;
  const auto add = [&](Sums& sum) {
    HEADRACE_CHANGED_UNIT(a);  // each has a product of its own
    sum = Unit::dot(sum, w, a);
  };
  for (int i = 0; i < rounds; ++i) {
    add(s0), add(s1), add(s2), add(s3), add(s4), add(s5);
    add(s6), add(s7), add(s8), add(s9), add(s10), add(s11);
  }
  for (Sums* sum : {&s0, &s1, &s2, &s3, &s4, &s5, &s6, &s7, &s8, &s9, &s10, &s11}) {
    Sums last = *sum;
    HEADRACE_CHANGED_UNIT(last);
  }
  return static_cast<int64_t>(rounds) * 12 * Unit::outputs * 4;
}

static int64_t float_loop(int rounds) {
  FloatRegister x = splat_register(1.0f);
  const FloatRegister y = splat_register(1e-6f);
  FloatRegister s0 = splat_register(0.0f), s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0,
                s7 = s0, s8 = s0, s9 = s0, s10 = s0, s11 = s0;
  const auto add = [&](FloatRegister& sum) {
    HEADRACE_CHANGED(x);
    sum = multiply_add(x, y, sum);
  };
  for (int i = 0; i < rounds; ++i) {
    add(s0), add(s1), add(s2), add(s3), add(s4), add(s5);
    add(s6), add(s7), add(s8), add(s9), add(s10), add(s11);
  }
  for (FloatRegister* sum : {&s0, &s1, &s2, &s3, &s4, &s5, &s6, &s7, &s8, &s9, &s10, &s11}) {
    FloatRegister last = *sum;
    HEADRACE_CHANGED(last);
  }
  return static_cast<int64_t>(rounds) * 12 * PART_LANES;
}

// Reads as a product of one row does: four streams, each asked for ahead.
static void read_loop(const uint8_t* data, size_t bytes) {
  const size_t quarter = bytes / 4 / 64 * 64;
  for (size_t at = 0; at < quarter; at += 64)
    for (int s = 0; s < 4; ++s) {
      const uint8_t* p = data + s * quarter + at;
      __builtin_prefetch(p + 2048, 0, 3);
      FloatRegister v = load_register(reinterpret_cast<const float*>(p));
      HEADRACE_CHANGED(v);
      for (int part = 1; part < PARTS; ++part) {
        v = load_register(reinterpret_cast<const float*>(p) + part * PART_LANES);
        HEADRACE_CHANGED(v);
      }
    }
}

#undef HEADRACE_CHANGED
#undef HEADRACE_CHANGED_UNIT

}  // namespace
}  // namespace headrace
