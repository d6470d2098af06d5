// Sixteen floats at a time, for any instruction set: the compiler's vector extension lowers them to
// one, two or four registers. Included by each path; everything here has internal linkage, so that
// code compiled for a newer processor never serves an older one.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels.h"

namespace headrace {
namespace {

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));

#define HEADRACE_INLINE static inline __attribute__((always_inline))

HEADRACE_INLINE Floats splat(float v) { return Floats{} + v; }

HEADRACE_INLINE Floats load(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

HEADRACE_INLINE void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }

// The first `n` of 16; the rest is `fill`.
HEADRACE_INLINE Floats load_part(const float* p, int n, float fill = 0.0f) {
  Floats v = splat(fill);
  std::memcpy(&v, p, static_cast<size_t>(n) * 4);
  return v;
}

HEADRACE_INLINE void store_part(float* p, Floats v, int n) {
  std::memcpy(p, &v, static_cast<size_t>(n) * 4);
}

HEADRACE_INLINE Ints lane_numbers() {
  return Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
}

HEADRACE_INLINE Floats maximum(Floats a, Floats b) { return a > b ? a : b; }

// Always the same tree, so that a sum does not depend on the instruction set's width.
HEADRACE_INLINE float sum_lanes(Floats v) {
  float s[16];
  std::memcpy(s, &v, sizeof s);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) s[i] += s[i + width];
  return s[0];
}

HEADRACE_INLINE float max_lanes(Floats v) {
  float s[16];
  std::memcpy(s, &v, sizeof s);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) s[i] = s[i] > s[i + width] ? s[i] : s[i + width];
  return s[0];
}

// Sums and maxima of integers may be taken in any order: whatever is quickest here.
HEADRACE_INLINE int32_t sum_lanes(Ints v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t total = 0;
  for (int i = 0; i < LANES; ++i) total += v[i];
  return total;
#endif
}

HEADRACE_INLINE int32_t max_lanes(Ints v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)v);
#else
  int32_t top = v[0];
  for (int i = 1; i < LANES; ++i) top = v[i] > top ? v[i] : top;
  return top;
#endif
}

HEADRACE_INLINE Ints bits_of(Floats v) {
  Ints bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits;
}

// Sixteen integers that fit a signed byte.
HEADRACE_INLINE void store_bytes(int8_t* p, Ints v) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)v));
#else
  typedef int8_t Chars __attribute__((vector_size(16)));
  const Chars bytes = __builtin_convertvector(v, Chars);
  std::memcpy(p, &bytes, sizeof bytes);
#endif
}

// exp(x) = 2^n * exp(r), |r| <= ln(2)/2: a polynomial of degree 6, about 1e-7 relative.
HEADRACE_INLINE Floats exponential(Floats x) {
  x = maximum(x, splat(-87.3f));
  x = x < splat(88.0f) ? x : splat(88.0f);
  // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
  const Floats shifter = splat(12582912.0f);
  const Floats n = (x * splat(1.44269504f) + shifter) - shifter;
  Floats r = x - n * splat(0.693359375f);
  r = r - n * splat(-2.12194440e-4f);
  Floats p = splat(1.3981999e-3f);
  p = p * r + splat(8.3334519e-3f);
  p = p * r + splat(4.1665796e-2f);
  p = p * r + splat(1.6666665e-1f);
  p = p * r + splat(0.5f);
  p = p * r * r + r + splat(1.0f);
  const Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
  Floats power;
  std::memcpy(&power, &exponent, sizeof power);
  return p * power;
}

HEADRACE_INLINE Floats hyperbolic_tangent(Floats x) {
  // 1 - 2 / (exp(2x) + 1); both ends saturate as they should.
  const Floats e = exponential(x + x);
  const Floats big = splat(1.0f) - splat(2.0f) / (e + splat(1.0f));
  // Near zero that cancels: use x - x^3/3 + 2x^5/15 - 17x^7/315.
  const Floats s = x * x;
  const Floats small =
      x * (splat(1.0f) + s * (splat(-1.0f / 3) + s * (splat(2.0f / 15) + s * splat(-17.0f / 315))));
  return s < splat(0.01f) ? small : big;
}

// Sixteen halves as floats.
HEADRACE_INLINE Floats load_half(const uint16_t* p) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  const __m256 low = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256 high = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)));
  Floats v;
  std::memcpy(&v, &low, 32);
  std::memcpy(reinterpret_cast<char*>(&v) + 32, &high, 32);
  return v;
#else
  float v[16];
  for (int i = 0; i < 16; ++i) v[i] = half_to_float(p[i]);
  return load(v);
#endif
}

HEADRACE_INLINE uint16_t to_half(float v) {
#if defined(__F16C__)
  return static_cast<uint16_t>(_cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT));
#else
  return float_to_half(v);
#endif
}

HEADRACE_INLINE Floats load_bfloat(const uint16_t* p) {
#if defined(__AVX512F__)
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return (Floats)_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
#else
  uint16_t halves[16];
  std::memcpy(halves, p, sizeof halves);
  uint32_t bits[16];
  for (int i = 0; i < 16; ++i) bits[i] = static_cast<uint32_t>(halves[i]) << 16;
  Floats v;
  std::memcpy(&v, bits, sizeof v);
  return v;
#endif
}

// Rounds to nearest even; a NaN stays one.
HEADRACE_INLINE uint16_t to_bfloat(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Sixteen signed bytes as floats.
HEADRACE_INLINE Floats load_bytes(const int8_t* p) {
#if defined(__AVX512F__)
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(raw));
#elif defined(__AVX2__)
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m256 low = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(raw));
  const __m256 high = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(raw, 8)));
  Floats v;
  std::memcpy(&v, &low, 32);
  std::memcpy(reinterpret_cast<char*>(&v) + 32, &high, 32);
  return v;
#else
  float v[16];
  for (int i = 0; i < 16; ++i) v[i] = static_cast<float>(p[i]);
  return load(v);
#endif
}

}  // namespace
}  // namespace headrace
