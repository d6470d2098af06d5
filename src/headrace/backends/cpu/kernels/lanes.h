// Arithmetic on sixteen floats at a time, and the types that are widened to them. Included by each
// path (vectors.h says how sixteen floats lie in registers).
#pragma once

#include <cmath>

#include "vectors.h"

namespace headrace {
namespace {

// a * b to the nearest integer, ties to even, as adding and subtracting 1.5 * 2^23 does.
HEADRACE_INLINE Floats round_product(const Floats& a, const Floats& b) {
  const Floats shifter = splat(12582912.0f);
  return multiply_add(a, b, shifter) - shifter;
}

// exp(x) = 2^n * exp(r), |r| <= ln(2)/2: a polynomial of degree 6, about 1e-7 relative. Ends at
// exp(-87.3) and exp(88); a NaN stays one.
HEADRACE_INLINE Floats exponential(Floats x) {
  x = maximum(splat(-87.3f), x);
  x = select(x > splat(88.0f), splat(88.0f), x);
  const Floats n = round_product(x, splat(1.44269504f));
  Floats r = multiply_add(n, splat(-0.693359375f), x);
  r = multiply_add(n, splat(2.12194440e-4f), r);
  Floats p = splat(1.3981999e-3f);
  p = multiply_add(p, r, splat(8.3334519e-3f));
  p = multiply_add(p, r, splat(4.1665796e-2f));
  p = multiply_add(p, r, splat(1.6666665e-1f));
  p = multiply_add(p, r, splat(0.5f));
  p = multiply_add(p * r, r, r + splat(1.0f));
  return p * as_floats((to_ints(n) + splat(127)) << 23);
}

HEADRACE_INLINE Floats hyperbolic_tangent(const Floats& x) {
  // 1 - 2 / (exp(2x) + 1); both ends saturate as they should.
  const Floats e = exponential(x + x);
  const Floats big = splat(1.0f) - splat(2.0f) / (e + splat(1.0f));
  // Near zero that cancels: use x - x^3/3 + 2x^5/15 - 17x^7/315.
  const Floats s = x * x;
  Floats small = multiply_add(s, splat(-17.0f / 315), splat(2.0f / 15));
  small = multiply_add(s, small, splat(-1.0f / 3));
  small = multiply_add(s, small, splat(1.0f));
  return select(s < splat(0.01f), x * small, big);
}

// Sixteen integers that fit a signed byte.
HEADRACE_INLINE void store_bytes(int8_t* p, const Ints& v) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)v));
#elif defined(__AVX2__)
  // Packing works in halves of 128 bits: 0-3 8-11 | 4-7 12-15.
  const __m256i words = _mm256_packs_epi32((__m256i)v.low, (__m256i)v.high);
  const __m256i ordered = _mm256_permute4x64_epi64(words, _MM_SHUFFLE(3, 1, 2, 0));
  const __m128i bytes =
      _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
#elif defined(HEADRACE_NEON)
  const auto words = [](const Pair<IntRegister>& half) {
    return vcombine_s16(vqmovn_s32((int32x4_t)half.low), vqmovn_s32((int32x4_t)half.high));
  };
  vst1q_s8(p, vcombine_s8(vqmovn_s16(words(v.low)), vqmovn_s16(words(v.high))));
#else
  int32_t values[LANES];
  store(values, v);
  for (int i = 0; i < LANES; ++i) p[i] = static_cast<int8_t>(values[i]);
#endif
}

// A register of floats from narrower ones. A half and a bfloat are types of their own.
struct Half {
  uint16_t bits;
};
struct Bfloat {
  uint16_t bits;
};

HEADRACE_INLINE FloatRegister load_register(const Half* p) {
#if defined(__AVX512F__)
  return (FloatRegister)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return (FloatRegister)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(HEADRACE_NEON)
  uint16x4_t raw;
  std::memcpy(&raw, p, sizeof raw);
  return (FloatRegister)vcvt_f32_f16(vreinterpret_f16_u16(raw));
#else
  float v[PART_LANES];
  for (int i = 0; i < PART_LANES; ++i) v[i] = half_to_float(p[i].bits);
  return load_register(v);
#endif
}

HEADRACE_INLINE FloatRegister load_register(const Bfloat* p) {
#if defined(__AVX512F__)
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return (FloatRegister)_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16);
#elif defined(__AVX2__)
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return (FloatRegister)_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16);
#elif defined(HEADRACE_NEON)
  uint16x4_t raw;
  std::memcpy(&raw, p, sizeof raw);
  return (FloatRegister)vshll_n_u16(raw, 16);
#else
  uint32_t bits[PART_LANES];
  for (int i = 0; i < PART_LANES; ++i) bits[i] = static_cast<uint32_t>(p[i].bits) << 16;
  FloatRegister v;
  std::memcpy(&v, bits, sizeof v);
  return v;
#endif
}

// Signed bytes.
HEADRACE_INLINE FloatRegister load_register(const int8_t* p) {
#if defined(__AVX512F__)
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return (FloatRegister)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(raw));
#elif defined(__AVX2__)
  const __m128i raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return (FloatRegister)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(raw));
#elif defined(HEADRACE_NEON)
  uint32_t four;
  std::memcpy(&four, p, sizeof four);
  const int16x8_t words = vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four)));
  return (FloatRegister)vcvtq_f32_s32(vmovl_s16(vget_low_s16(words)));
#else
  float v[PART_LANES];
  for (int i = 0; i < PART_LANES; ++i) v[i] = static_cast<float>(p[i]);
  return load_register(v);
#endif
}

// And back: rounded to nearest even; what is not a number stays so.
HEADRACE_INLINE void store_register(Half* p, const FloatRegister& v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(HEADRACE_NEON)
  const float16x4_t halves = vcvt_f16_f32((float32x4_t)v);
  std::memcpy(p, &halves, sizeof halves);
#else
  for (int i = 0; i < PART_LANES; ++i) p[i].bits = float_to_half(v[i]);
#endif
}

HEADRACE_INLINE void store_register(Bfloat* p, const FloatRegister& v) {
  uint32_t bits[PART_LANES];
  std::memcpy(bits, &v, sizeof bits);
  for (int i = 0; i < PART_LANES; ++i) {
    const bool not_a_number = (bits[i] & 0x7fffffffu) > 0x7f800000u;
    const uint32_t rounded = bits[i] + 0x7fff + ((bits[i] >> 16) & 1);
    p[i].bits = static_cast<uint16_t>((not_a_number ? bits[i] | 0x400000u : rounded) >> 16);
  }
}

}  // namespace
}  // namespace headrace
