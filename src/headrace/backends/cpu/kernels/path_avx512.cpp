// The AVX-512 VNNI path: 16 outputs per register, four int8 products per lane and instruction.
#include <immintrin.h>

#include "kernels.h"

namespace headrace {
namespace {

struct Unit {
  static constexpr int outputs = 16;
  // Two blocks for many rows (registers), four for few (four far streams).
  static constexpr int rows[] = {6, 6, 0, 3};
  static constexpr int registers(int /*rows*/) { return 1; }
  static constexpr int eight_bit_offset = 0;
  static constexpr bool unpacks = true;
  using Codes = __m512i;
  using Sums = __m512i;
  using Values = __m512;

  static inline Codes codes8(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static inline Codes low4(const uint8_t* p) {
    return _mm512_and_si512(codes8(p), _mm512_set1_epi8(0x0f));
  }
  static inline Codes high4(const uint8_t* p) {
    return _mm512_and_si512(_mm512_srli_epi16(codes8(p), 4), _mm512_set1_epi8(0x0f));
  }
  static inline Codes same4(const int8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
  }
  static inline Sums start(int32_t x) { return _mm512_set1_epi32(x); }
  static inline Sums dot(Sums sums, Codes w, Codes a) { return _mm512_dpbusd_epi32(sums, w, a); }
  static inline Sums dot4(Sums sums, Codes w, Codes a) { return dot(sums, w, a); }
  static inline Values factors(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static inline Values times(Values v, float x) { return _mm512_mul_ps(v, _mm512_set1_ps(x)); }
  static inline Values scaled(Sums whole, Values scale, Values sums) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), scale, sums);
  }
  static inline Values added(Values minimum, float x, Values sums) {
    return _mm512_fmadd_ps(minimum, _mm512_set1_ps(x), sums);
  }
};

}  // namespace
}  // namespace headrace

#include "table.h"

namespace headrace {

const Kernels& avx512_kernels() {
  static const Kernels table = make_table("avx512-vnni");
  return table;
}

}  // namespace headrace
