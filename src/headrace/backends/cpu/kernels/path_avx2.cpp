// The AVX2 path: 8 outputs per register. Products of bytes go through 16-bit pairs, which never
// overflow: 4-bit codes are small, 8-bit codes are made signed and their magnitude is multiplied.
#include "unit_256.h"

namespace headrace {
namespace {

struct Unit : Unit256 {
  static constexpr int eight_bit_offset = 128;
  static inline Codes codes8(const uint8_t* p) {
    return _mm256_xor_si256(bytes(p), _mm256_set1_epi8(static_cast<char>(0x80)));
  }
  // Signed bytes: |w| * (x with w's sign). 128 * 127 * 2 still fits 16 bits.
  static inline Sums dot(Sums sums, Codes w, Codes a) {
    return dot4(sums, _mm256_abs_epi8(w), _mm256_sign_epi8(a, w));
  }
  static inline Sums dot4(Sums sums, Codes w, Codes a) {
    const __m256i pairs = _mm256_maddubs_epi16(w, a);
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
};

}  // namespace
}  // namespace headrace

#include "table.h"

namespace headrace {

const Kernels& avx2_kernels() {
  static const Kernels table = make_table("avx2");
  return table;
}

}  // namespace headrace
