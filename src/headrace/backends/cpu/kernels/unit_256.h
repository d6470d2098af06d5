// What the two paths of 8 outputs a register share: all of a Unit (tile.h) but the dot product and
// how 8-bit codes are taken for it. Included by path_avx2.cpp and path_avxvnni.cpp.
#pragma once

#include <immintrin.h>

#include "kernels.h"

namespace headrace {
namespace {

struct Unit256 {
  static constexpr int outputs = 8;
  static constexpr int rows[] = {6, 0, 0, 0};
  // The sums of half a block and six rows just fit sixteen registers.
  static constexpr int registers(int /*rows*/) { return 1; }
  static constexpr bool unpacks = false;
  using Codes = __m256i;
  using Sums = __m256i;
  using Values = __m256;

  static inline Codes bytes(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static inline Codes low4(const uint8_t* p) {
    return _mm256_and_si256(bytes(p), _mm256_set1_epi8(0x0f));
  }
  static inline Codes high4(const uint8_t* p) {
    return _mm256_and_si256(_mm256_srli_epi16(bytes(p), 4), _mm256_set1_epi8(0x0f));
  }
  static inline Codes same4(const int8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
  }
  static inline Sums start(int32_t x) { return _mm256_set1_epi32(x); }
  static inline Values factors(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static inline Values times(Values v, float x) { return _mm256_mul_ps(v, _mm256_set1_ps(x)); }
  static inline Values scaled(Sums whole, Values scale, Values sums) {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole), scale, sums);
  }
  static inline Values added(Values minimum, float x, Values sums) {
    return _mm256_fmadd_ps(minimum, _mm256_set1_ps(x), sums);
  }
};

}  // namespace
}  // namespace headrace
