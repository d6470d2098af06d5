// What the two paths of ARM share: all of a Unit (tile.h) but the dot product. 4 outputs a register.
// Included first by path_neon.cpp and path_dotprod.cpp: HEADRACE_NEON is what tells the other headers
// from the portable path, which a compiler for ARM gives the same registers.
#pragma once

#define HEADRACE_NEON

#include <arm_neon.h>

#include "kernels.h"

namespace headrace {
namespace {

struct UnitNeon {
  static constexpr int outputs = 4;
  static constexpr int rows[] = {6, 0, 0, 0};
  // Thirty-two registers: whole and scaled sums of up to three rows and a block fit, of six rows and
  // half a block too.
  static constexpr int registers(int rows) { return rows <= 3 ? 4 : 2; }
  static constexpr bool unpacks = false;
  // Both factors of a product are signed.
  static constexpr int eight_bit_offset = 128;
  using Codes = int8x16_t;
  using Sums = int32x4_t;
  using Values = float32x4_t;

  static inline Codes codes8(const uint8_t* p) {
    return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p), vdupq_n_u8(0x80)));
  }
  static inline Codes low4(const uint8_t* p) {
    return vreinterpretq_s8_u8(vandq_u8(vld1q_u8(p), vdupq_n_u8(0x0f)));
  }
  static inline Codes high4(const uint8_t* p) {
    return vreinterpretq_s8_u8(vshrq_n_u8(vld1q_u8(p), 4));
  }
  static inline Codes same4(const int8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
  }
  static inline Sums start(int32_t x) { return vdupq_n_s32(x); }
  static inline Values factors(const uint16_t* p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
  }
  static inline Values times(Values v, float x) { return vmulq_n_f32(v, x); }
  static inline Values scaled(Sums whole, Values scale, Values sums) {
    return vfmaq_f32(sums, vcvtq_f32_s32(whole), scale);
  }
  static inline Values added(Values minimum, float x, Values sums) {
    return vfmaq_n_f32(sums, minimum, x);
  }
};

}  // namespace
}  // namespace headrace
