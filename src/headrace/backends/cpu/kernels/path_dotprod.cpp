// The NEON path for processors with dot products of bytes (Armv8.2's FEAT_DotProd: Graviton 2 and
// newer, Apple's M1 and newer): four int8 products per lane and instruction.
#include "unit_neon.h"

namespace headrace {
namespace {

struct Unit : UnitNeon {
  static inline Sums dot(Sums sums, Codes w, Codes a) { return vdotq_s32(sums, w, a); }
  static inline Sums dot4(Sums sums, Codes w, Codes a) { return dot(sums, w, a); }
};

}  // namespace
}  // namespace headrace

#include "table.h"

namespace headrace {

const Kernels& dotprod_kernels() {
  static const Kernels table = make_table("neon-dotprod");
  return table;
}

}  // namespace headrace
