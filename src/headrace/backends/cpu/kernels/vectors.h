// Sixteen floats, and sixteen integers, in as many registers as the instruction set needs: one of
// AVX-512, a pair of AVX2, a pair of pairs of anything else. Included by each path; everything here
// has internal linkage, so that code compiled for a newer processor never serves an older one.
//
// The compiler's own wide vectors would do, but those wider than a register live in memory: sums
// that grow in a loop would be stored and loaded again at every step. So do arrays of pairs: loops
// that keep many sums use arrays of single registers, PARTS of them for sixteen values.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(HEADRACE_NEON)
#include <arm_neon.h>
#endif

#include "kernels.h"

namespace headrace {
namespace {

#define HEADRACE_INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int REGISTER_BYTES = 64;
#elif defined(__AVX2__)
constexpr int REGISTER_BYTES = 32;
#else
constexpr int REGISTER_BYTES = 16;
#endif

typedef float FloatRegister __attribute__((vector_size(REGISTER_BYTES)));
typedef int32_t IntRegister __attribute__((vector_size(REGISTER_BYTES)));

constexpr int PARTS = LANES * 4 / REGISTER_BYTES;
constexpr int PART_LANES = LANES / PARTS;

template <typename V>
struct Pair {
  V low, high;
};

#if defined(__AVX512F__)
using Floats = FloatRegister;
using Ints = IntRegister;
#elif defined(__AVX2__)
using Floats = Pair<FloatRegister>;
using Ints = Pair<IntRegister>;
#else
using Floats = Pair<Pair<FloatRegister>>;
using Ints = Pair<Pair<IntRegister>>;
#endif

#define HEADRACE_PAIRWISE(op)                                                             \
  template <typename V>                                                                   \
  HEADRACE_INLINE auto operator op(const Pair<V>& a, const Pair<V>& b) {                  \
    return Pair<decltype(a.low op b.low)>{a.low op b.low, a.high op b.high};              \
  }
HEADRACE_PAIRWISE(+)
HEADRACE_PAIRWISE(-)
HEADRACE_PAIRWISE(*)
HEADRACE_PAIRWISE(/)
HEADRACE_PAIRWISE(&)
HEADRACE_PAIRWISE(|)
HEADRACE_PAIRWISE(<)
HEADRACE_PAIRWISE(>)
HEADRACE_PAIRWISE(<=)
HEADRACE_PAIRWISE(==)
HEADRACE_PAIRWISE(!=)
#undef HEADRACE_PAIRWISE

template <typename V>
HEADRACE_INLINE Pair<V> operator-(const Pair<V>& a) {
  return {-a.low, -a.high};
}
template <typename V>
HEADRACE_INLINE Pair<V> operator<<(const Pair<V>& a, int n) {
  return {a.low << n, a.high << n};
}
template <typename V>
HEADRACE_INLINE Pair<V>& operator+=(Pair<V>& a, const Pair<V>& b) {
  return a = a + b;
}
template <typename V>
HEADRACE_INLINE Pair<V>& operator*=(Pair<V>& a, const Pair<V>& b) {
  return a = a * b;
}
template <typename V>
HEADRACE_INLINE Pair<V>& operator|=(Pair<V>& a, const Pair<V>& b) {
  return a = a | b;
}

// Minus zero, not plus: x - 0 is x for every x, so that the compiler leaves it out.
HEADRACE_INLINE void fill(FloatRegister& v, float x) { v = x - FloatRegister{}; }
HEADRACE_INLINE void fill(IntRegister& v, int32_t x) { v = x - IntRegister{}; }
template <typename V, typename E>
HEADRACE_INLINE void fill(Pair<V>& v, E x) {
  fill(v.low, x);
  fill(v.high, x);
}
HEADRACE_INLINE FloatRegister splat_register(float x) {
  FloatRegister v;
  fill(v, x);
  return v;
}
HEADRACE_INLINE FloatRegister load_register(const float* p) {
  FloatRegister v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
HEADRACE_INLINE void store_register(float* p, const FloatRegister& v) {
  std::memcpy(p, &v, sizeof v);
}
HEADRACE_INLINE Floats splat(float x) {
  Floats v;
  fill(v, x);
  return v;
}
HEADRACE_INLINE Ints splat(int32_t x) {
  Ints v;
  fill(v, x);
  return v;
}

// Where the comparison held, a; elsewhere b.
HEADRACE_INLINE FloatRegister select(IntRegister held, FloatRegister a, FloatRegister b) {
  return held ? a : b;
}
HEADRACE_INLINE IntRegister select(IntRegister held, IntRegister a, IntRegister b) {
  return held ? a : b;
}
template <typename M, typename V>
HEADRACE_INLINE Pair<V> select(const Pair<M>& held, const Pair<V>& a, const Pair<V>& b) {
  return {select(held.low, a.low, b.low), select(held.high, a.high, b.high)};
}

// a * b + c, rounded once where the path has an instruction for it, and only where it is written: the
// compiler may not fuse on its own (-ffp-contract=off), for each would choose other places to.
HEADRACE_INLINE float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(HEADRACE_NEON)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}
HEADRACE_INLINE FloatRegister multiply_add(FloatRegister a, FloatRegister b, FloatRegister c) {
#if defined(__AVX512F__)
  return (FloatRegister)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (FloatRegister)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(HEADRACE_NEON)
  return (FloatRegister)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
template <typename V>
HEADRACE_INLINE Pair<V> multiply_add(const Pair<V>& a, const Pair<V>& b, const Pair<V>& c) {
  return {multiply_add(a.low, b.low, c.low), multiply_add(a.high, b.high, c.high)};
}

// Floats that are whole numbers, as integers.
HEADRACE_INLINE IntRegister to_ints(FloatRegister v) {
  return __builtin_convertvector(v, IntRegister);
}
template <typename V>
HEADRACE_INLINE auto to_ints(const Pair<V>& v) {
  return Pair<decltype(to_ints(v.low))>{to_ints(v.low), to_ints(v.high)};
}

// Values from or to memory, where a Pair lies as it does here. Register by register: GCC keeps a pair
// that was copied as a whole in memory, and every sum that it goes into.
template <typename V, typename E>
HEADRACE_INLINE void read(V& v, const E* p) {
  std::memcpy(&v, p, sizeof v);
}
template <typename V, typename E>
HEADRACE_INLINE void read(Pair<V>& v, const E* p) {
  read(v.low, p);
  read(v.high, p + sizeof(V) / sizeof(E));
}
template <typename V, typename E>
HEADRACE_INLINE void write(E* p, const V& v) {
  std::memcpy(p, &v, sizeof v);
}
template <typename V, typename E>
HEADRACE_INLINE void write(E* p, const Pair<V>& v) {
  write(p, v.low);
  write(p + sizeof(V) / sizeof(E), v.high);
}

// Sixteen of them.
template <typename E>
HEADRACE_INLINE auto load(const E* p) {
  std::conditional_t<std::is_same_v<E, float>, Floats, Ints> v;
  read(v, p);
  return v;
}
HEADRACE_INLINE void store(float* p, const Floats& v) { write(p, v); }
HEADRACE_INLINE void store(int32_t* p, const Ints& v) { write(p, v); }

// The first `n` of 16; the rest is `rest`.
HEADRACE_INLINE Floats load_part(const float* p, int n, float rest = 0.0f) {
  float values[LANES];
  for (int i = 0; i < LANES; ++i) values[i] = rest;
  std::memcpy(values, p, static_cast<size_t>(n) * sizeof(float));
  return load(values);
}
HEADRACE_INLINE void store_part(float* p, const Floats& v, int n) {
  float values[LANES];
  store(values, v);
  std::memcpy(p, values, static_cast<size_t>(n) * sizeof(float));
}

HEADRACE_INLINE FloatRegister as_floats(IntRegister bits) { return (FloatRegister)bits; }
HEADRACE_INLINE IntRegister as_bits(FloatRegister v) { return (IntRegister)v; }
template <typename V>
HEADRACE_INLINE auto as_floats(const Pair<V>& bits) {
  return Pair<decltype(as_floats(bits.low))>{as_floats(bits.low), as_floats(bits.high)};
}
template <typename V>
HEADRACE_INLINE auto as_bits(const Pair<V>& v) {
  return Pair<decltype(as_bits(v.low))>{as_bits(v.low), as_bits(v.high)};
}

HEADRACE_INLINE Ints lane_numbers() {
  constexpr int32_t numbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load(numbers);
}

// Where a > b, a; elsewhere b, so that a NaN in b stays.
HEADRACE_INLINE IntRegister maximum(IntRegister a, IntRegister b) { return a > b ? a : b; }
HEADRACE_INLINE FloatRegister maximum(FloatRegister a, FloatRegister b) {
#if defined(__AVX512F__)
  return (FloatRegister)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (FloatRegister)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
template <typename V>
HEADRACE_INLINE Pair<V> maximum(const Pair<V>& a, const Pair<V>& b) {
  return {maximum(a.low, b.low), maximum(a.high, b.high)};
}

// Lanes of a register in another order. GCC before 12 knows only its own word for it.
template <int... Lane, typename V>
HEADRACE_INLINE V permute(const V& v) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(v, v, Lane...);
#else
  return __builtin_shuffle(v, IntRegister{Lane...});
#endif
}

// One value of all sixteen. The tree is always the same, so that a sum does not depend on the width
// of a register: lane i and lane i + 8, then + 4, + 2, + 1.
template <typename V, typename Combine>
HEADRACE_INLINE auto reduce_lanes(const V& v, Combine combine) {
  V w = v;
  if constexpr (sizeof(V) == 64) {
    w = combine(w, permute<8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7>(w));
    w = combine(w, permute<4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11>(w));
    w = combine(w, permute<2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13>(w));
    w = combine(w, permute<1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14>(w));
  } else if constexpr (sizeof(V) == 32) {
    w = combine(w, permute<4, 5, 6, 7, 0, 1, 2, 3>(w));
    w = combine(w, permute<2, 3, 0, 1, 6, 7, 4, 5>(w));
    w = combine(w, permute<1, 0, 3, 2, 5, 4, 7, 6>(w));
  } else {
    w = combine(w, permute<2, 3, 0, 1>(w));
    w = combine(w, permute<1, 0, 3, 2>(w));
  }
  return w[0];
}
template <typename V, typename Combine>
HEADRACE_INLINE auto reduce_lanes(const Pair<V>& v, Combine combine) {
  return reduce_lanes(combine(v.low, v.high), combine);
}

struct Plus {
  template <typename V>
  V operator()(const V& a, const V& b) const {
    return a + b;
  }
};
struct Larger {
  template <typename V>
  V operator()(const V& a, const V& b) const {
    return maximum(a, b);
  }
};

HEADRACE_INLINE float sum_lanes(const Floats& v) { return reduce_lanes(v, Plus{}); }
HEADRACE_INLINE int32_t sum_lanes(const Ints& v) { return reduce_lanes(v, Plus{}); }
HEADRACE_INLINE float max_lanes(const Floats& v) { return reduce_lanes(v, Larger{}); }
HEADRACE_INLINE int32_t max_lanes(const Ints& v) { return reduce_lanes(v, Larger{}); }

}  // namespace
}  // namespace headrace
