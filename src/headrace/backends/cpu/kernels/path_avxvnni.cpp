// The AVX-VNNI path, for processors with int8 products but without AVX-512: 8 outputs per register.
#include "unit_256.h"

namespace headrace {
namespace {

struct Unit : Unit256 {
  static constexpr int eight_bit_offset = 0;
  static inline Codes codes8(const uint8_t* p) { return bytes(p); }
  static inline Sums dot(Sums sums, Codes w, Codes a) {
    return _mm256_dpbusd_avx_epi32(sums, w, a);
  }
  static inline Sums dot4(Sums sums, Codes w, Codes a) { return dot(sums, w, a); }
};

}  // namespace
}  // namespace headrace

#include "table.h"

namespace headrace {

const Kernels& avxvnni_kernels() {
  static const Kernels table = make_table("avx-vnni");
  return table;
}

}  // namespace headrace
