// The NEON path, for every 64-bit ARM processor: products of bytes go through 16-bit pairs, which
// never overflow, for 128 * 127 * 2 still fits.
#include "unit_neon.h"

namespace headrace {
namespace {

struct Unit : UnitNeon {
  static inline Sums dot(Sums sums, Codes w, Codes a) {
    const int16x8_t first = vmull_s8(vget_low_s8(w), vget_low_s8(a));
    const int16x8_t second = vmull_high_s8(w, a);
    return vpadalq_s16(sums, vpaddq_s16(first, second));
  }
  static inline Sums dot4(Sums sums, Codes w, Codes a) { return dot(sums, w, a); }
};

}  // namespace
}  // namespace headrace

#include "table.h"

namespace headrace {

const Kernels& neon_kernels() {
  static const Kernels table = make_table("neon");
  return table;
}

}  // namespace headrace
