// Norms, rope, activations and sums, a row at a time, over lanes.h. Included by each path.
#pragma once

#include <utility>

#include "lanes.h"

namespace headrace {
namespace {

static void norm(const float* x, const float* weight, float eps, int n, float* out) {
  Floats squares = splat(0.0f);
  int i = 0;
  for (; i + LANES <= n; i += LANES) {
    const Floats v = load(x + i);
    squares = multiply_add(v, v, squares);
  }
  if (i < n) {
    const Floats v = load_part(x + i, n - i);
    squares = multiply_add(v, v, squares);
  }
  const float mean = sum_lanes(squares) / static_cast<float>(n);
  const Floats scale = splat(1.0f / std::sqrt(mean + eps));
  for (i = 0; i + LANES <= n; i += LANES) store(out + i, load(x + i) * scale * load(weight + i));
  if (i < n)
    store_part(out + i, load_part(x + i, n - i) * scale * load_part(weight + i, n - i), n - i);
}

// Pairs beside each other, a register of them at a time: x * cosines + (x with its pairs swapped)
// * (-sines, sines).
template <int... Lane>
HEADRACE_INLINE int rope_pairs(float* head, const float* cosines, const float* sines, int half,
                               std::integer_sequence<int, Lane...>) {
  constexpr int pairs = PART_LANES / 2;
  constexpr float SIGN[] = {(Lane % 2 ? 1.0f : -1.0f)...};
  const FloatRegister sign = load_register(SIGN);
  const auto doubled = [](const float* p) {
#if defined(__AVX512F__)
    const auto v = (FloatRegister)_mm512_castps256_ps512(_mm256_loadu_ps(p));
#elif defined(__AVX2__)
    const auto v = (FloatRegister)_mm256_castps128_ps256(_mm_loadu_ps(p));
#else
    FloatRegister v{};
    std::memcpy(&v, p, sizeof(float) * pairs);
#endif
    return permute<Lane / 2 ...>(v);
  };
  int i = 0;
  for (; i + pairs <= half; i += pairs) {
    const FloatRegister x = load_register(head + 2 * i);
    const FloatRegister turned = permute<(Lane ^ 1)...>(x) * (doubled(sines + i) * sign);
    store_register(head + 2 * i, multiply_add(x, doubled(cosines + i), turned));
  }
  return i;
}

static void rope(float* head, const float* cosines, const float* sines, int half,
                 bool interleaved) {
  if (interleaved) {
    constexpr auto lanes = std::make_integer_sequence<int, PART_LANES>{};
    for (int i = rope_pairs(head, cosines, sines, half, lanes); i < half; ++i) {
      const float a = head[2 * i], b = head[2 * i + 1];
      head[2 * i] = multiply_add(a, cosines[i], -(b * sines[i]));
      head[2 * i + 1] = multiply_add(b, cosines[i], a * sines[i]);
    }
  } else {
    for (int i = 0; i < half; ++i) {
      const float a = head[i], b = head[i + half];
      head[i] = multiply_add(a, cosines[i], -(b * sines[i]));
      head[i + half] = multiply_add(a, sines[i], b * cosines[i]);
    }
  }
}

HEADRACE_INLINE Floats silu(Floats x) { return x / (splat(1.0f) + exponential(-x)); }

HEADRACE_INLINE Floats gelu_tanh(Floats x) {
  const Floats inner = splat(0.7978845608f) * multiply_add(splat(0.044715f) * x * x, x, x);
  return splat(0.5f) * x * (splat(1.0f) + hyperbolic_tangent(inner));
}

template <typename Activation>
HEADRACE_INLINE void gate(const float* gate_up, int n, float* out, Activation activation) {
  int i = 0;
  for (; i + LANES <= n; i += LANES)
    store(out + i, activation(load(gate_up + i)) * load(gate_up + n + i));
  if (i < n)
    store_part(out + i,
               activation(load_part(gate_up + i, n - i)) * load_part(gate_up + n + i, n - i),
               n - i);
}

static void gated(const float* gate_up, bool gelu, int n, float* out) {
  if (gelu)
    gate(gate_up, n, out, [](Floats x) { return gelu_tanh(x); });
  else
    gate(gate_up, n, out, [](Floats x) { return silu(x); });
}

static void add(const float* x, const float* y, int n, float* out) {
  int i = 0;
  for (; i + LANES <= n; i += LANES) store(out + i, load(x + i) + load(y + i));
  for (; i < n; ++i) out[i] = x[i] + y[i];
}

static void softcap(const float* x, float cap, int n, float* out) {
  const Floats inverse = splat(1.0f / cap), scale = splat(cap);
  int i = 0;
  for (; i + LANES <= n; i += LANES)
    store(out + i, scale * hyperbolic_tangent(load(x + i) * inverse));
  if (i < n)
    store_part(out + i, scale * hyperbolic_tangent(load_part(x + i, n - i) * inverse), n - i);
}

static void exponentials(const float* x, float shift, float scale, int n, float* out) {
  int i = 0;
  for (; i + LANES <= n; i += LANES)
    store(out + i, exponential((load(x + i) - splat(shift)) * splat(scale)));
  if (i < n)
    store_part(out + i, exponential((load_part(x + i, n - i) - splat(shift)) * splat(scale)),
               n - i);
}

static void log_sum_exp(const float* x, int n, float* highest, double* log_sum) {
  const float low = -INFINITY;
  Floats top = splat(low);
  Ints unordered = splat(0);  // maximum() may lose a NaN
  int i = 0;
  for (; i < n; i += LANES) {
    const Floats v = i + LANES <= n ? load(x + i) : load_part(x + i, n - i, low);
    top = maximum(top, v);
    unordered |= v != v;
  }
  *highest = max_lanes(top);
  if (sum_lanes(unordered) != 0) *highest = NAN;
  const Floats shift = splat(*highest);
  double total = 0;
  // Float partial sums over short runs, added up in double: a vocabulary is long.
  for (i = 0; i < n;) {
    Floats part = splat(0.0f);
    for (int run = 0; run < 64 && i < n; ++run, i += LANES) {
      // exponential() is at least exp(-87): negligible in a sum of at least 1.
      const Floats v = i + LANES <= n ? load(x + i) : load_part(x + i, n - i, low);
      part += exponential(v - shift);
    }
    total += static_cast<double>(sum_lanes(part));
  }
  *log_sum = std::log(total);
}

}  // namespace
}  // namespace headrace
