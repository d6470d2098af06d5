// The AVX2 path: 8 outputs a register. Products of bytes go through 16-bit pairs, which never
// overflow: 4-bit codes are small, 8-bit codes are made signed and their magnitude is multiplied.
#include "attention.h"
#include "elementwise.h"
#include "quantize.h"
#include "tile.h"

namespace headrace {
namespace {

HEADRACE_INLINE __m256i dot_small(__m256i sums, __m256i codes, __m256i x) {
  const __m256i pairs = _mm256_maddubs_epi16(codes, x);
  return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

// Signed bytes: |w| * (x with w's sign). 128 * 127 * 2 still fits 16 bits.
HEADRACE_INLINE __m256i dot_signed(__m256i sums, __m256i w, __m256i x) {
  return dot_small(sums, _mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
}

HEADRACE_INLINE __m256i four_inputs(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}

// One group of 32 (or 16) inputs for 8 outputs. 8-bit codes are taken as code - 128.
template <Kind K, int R>
HEADRACE_INLINE void multiply_codes(const uint8_t* codes, const Group<R>& group, int part,
                                    int zero, __m256i (&sums)[R]) {
  using S = Shape<K>;
  const int offset = S::four_bits ? zero : zero - 128;
  for (int r = 0; r < R; ++r)
    sums[r] = _mm256_set1_epi32(-offset * group.template sum<K>(r, part));
  const int8_t* x = group.codes + part * 16;
  constexpr int inputs = 32 / S::groups;
  if constexpr (S::four_bits) {
    const __m256i mask = _mm256_set1_epi8(0x0f);
    for (int i = 0; i < inputs / 8; ++i) {
      const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 64 * i));
      const __m256i low = _mm256_and_si256(w, mask);
      const __m256i high = _mm256_and_si256(_mm256_srli_epi16(w, 4), mask);
      for (int r = 0; r < R; ++r) {
        const int8_t* p = x + r * QUANTIZED_GROUP + 8 * i;
        sums[r] = dot_small(sums[r], low, four_inputs(p));
        sums[r] = dot_small(sums[r], high, four_inputs(p + 4));
      }
    }
  } else {
    const __m256i flip = _mm256_set1_epi8(static_cast<char>(0x80));
    for (int i = 0; i < inputs / 4; ++i) {
      const __m256i w = _mm256_xor_si256(
          _mm256_loadu_si256(
              reinterpret_cast<const __m256i*>(codes + part * 256 + 64 * i)),
          flip);
      for (int r = 0; r < R; ++r)
        sums[r] = dot_signed(sums[r], w, four_inputs(x + r * QUANTIZED_GROUP + 4 * i));
    }
  }
}

// Half a block (8 outputs) x R rows: the sums of six rows just fit sixteen registers.
template <Kind K, int R>
HEADRACE_INLINE void half_block(const Tile& t, const uint8_t* stream, int lane, Floats (&out)[R]) {
  using S = Shape<K>;
  __m256 sums[R];
  for (int r = 0; r < R; ++r) sums[r] = _mm256_setzero_ps();
  const uint8_t* rows = t.rows;
  for (int record = 0; record < t.records; ++record) {
    const uint8_t* w = stream + static_cast<size_t>(record) * S::record_bytes;
    for (int half = 0; half < 2; ++half, rows += R * QUANTIZED_BYTES) {
      const Group<R> group(rows);
      for (int part = 0; part < S::groups; ++part) {
        __m256i whole[R];
        multiply_codes<K, R>(w + half * S::half_codes + lane * 4, group, part, t.zero, whole);
        const uint8_t* at = w + S::scales_at + (half * S::groups + part) * LANES * 2 + lane * 2;
        const __m256 scale =
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
        for (int r = 0; r < R; ++r)
          sums[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole[r]),
                                    _mm256_mul_ps(scale, _mm256_set1_ps(group.scales[r])),
                                    sums[r]);
        if constexpr (S::minimum) {
          const __m256 minimum = _mm256_cvtph_ps(
              _mm_loadu_si128(reinterpret_cast<const __m128i*>(at + S::scales_bytes)));
          // 8-bit codes with a minimum have zero 0, so they were taken 128 too low: undone above.
          for (int r = 0; r < R; ++r)
            sums[r] = _mm256_fmadd_ps(minimum, _mm256_set1_ps(group.scaled_sums[r]), sums[r]);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r)
    std::memcpy(reinterpret_cast<char*>(&out[r]) + lane * 4, &sums[r], 32);
}

template <Kind K, int B, int R>
static void tile(const Tile& t) {
  if constexpr (static_cast<int>(K) < QUANTIZED_KINDS) {
    for (int b = 0; b < B; ++b) {
      Floats sums[R];
      half_block<K, R>(t, t.streams[b], 0, sums);
      half_block<K, R>(t, t.streams[b], 8, sums);
      for (int r = 0; r < R; ++r) store_outputs(t, b, r, sums[r]);
    }
  } else {
    float_tile<K, B, R>(t);
  }
}

#define HEADRACE_TILES(K)                                                                     \
  {                                                                                           \
    {tile<K, 1, 1>, tile<K, 1, 2>, tile<K, 1, 3>, tile<K, 1, 4>, tile<K, 1, 5>, tile<K, 1, 6>} \
  }

}  // namespace

const Kernels& avx2_kernels() {
  static const Kernels table = {
      "avx2",
      quantize,
      {HEADRACE_TILES(Kind::U4Zero), HEADRACE_TILES(Kind::U4Minimum),
       HEADRACE_TILES(Kind::U8Zero), HEADRACE_TILES(Kind::U8Minimum),
       HEADRACE_TILES(Kind::U8Zero16), HEADRACE_TILES(Kind::F32), HEADRACE_TILES(Kind::F16),
       HEADRACE_TILES(Kind::BF16)},
      norm,
      rope,
      gated,
      add,
      softcap,
      {write_kv<float>, write_kv<Half>, write_kv<Bfloat>, write_kv<int8_t>},
      {attend<float>, attend<Half>, attend<Bfloat>, attend<int8_t>},
      log_sum_exp,
      exponentials,
  };
  return table;
}

}  // namespace headrace
