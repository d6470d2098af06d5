// The AVX-512 VNNI path: 16 outputs a register, four int8 products a lane and instruction.
#include "attention.h"
#include "elementwise.h"
#include "quantize.h"
#include "tile.h"

namespace headrace {
namespace {

// One group of 32 inputs: B blocks x R rows of integer sums, each starting at -zero * sum.
template <Kind K, int B, int R>
HEADRACE_INLINE void multiply_codes(const uint8_t* const (&codes)[B], const Group<R>& group,
                                    int part, int zero, __m512i (&sums)[B][R]) {
  using S = Shape<K>;
  for (int r = 0; r < R; ++r) {
    const __m512i start =
        S::minimum ? _mm512_setzero_si512()
                   : _mm512_set1_epi32(-zero * group.template sum<K>(r, part));
    for (int b = 0; b < B; ++b) sums[b][r] = start;
  }
  const int8_t* x = group.codes + part * 16;
  constexpr int inputs = 32 / S::groups;
  if constexpr (S::four_bits) {
    const __m512i mask = _mm512_set1_epi8(0x0f);
    for (int i = 0; i < inputs / 8; ++i) {
      __m512i w[B];
      for (int b = 0; b < B; ++b) w[b] = _mm512_loadu_si512(codes[b] + 64 * i);
      for (int high = 0; high < 2; ++high) {
        __m512i v[B];
        for (int b = 0; b < B; ++b)
          v[b] = _mm512_and_si512(high ? _mm512_srli_epi16(w[b], 4) : w[b], mask);
        for (int r = 0; r < R; ++r) {
          int32_t four;
          std::memcpy(&four, x + r * QUANTIZED_GROUP + 8 * i + 4 * high, 4);
          const __m512i a = _mm512_set1_epi32(four);
          for (int b = 0; b < B; ++b) sums[b][r] = _mm512_dpbusd_epi32(sums[b][r], v[b], a);
        }
      }
    }
  } else {
    for (int i = 0; i < inputs / 4; ++i) {
      __m512i w[B];
      for (int b = 0; b < B; ++b)
        w[b] = _mm512_loadu_si512(codes[b] + part * 256 + 64 * i);
      for (int r = 0; r < R; ++r) {
        int32_t four;
        std::memcpy(&four, x + r * QUANTIZED_GROUP + 4 * i, 4);
        const __m512i a = _mm512_set1_epi32(four);
        for (int b = 0; b < B; ++b) sums[b][r] = _mm512_dpbusd_epi32(sums[b][r], w[b], a);
      }
    }
  }
}

template <Kind K, int B, int R>
HEADRACE_INLINE void quantized_tile(const Tile& t) {
  using S = Shape<K>;
  __m512 sums[B][R];
  for (int b = 0; b < B; ++b)
    for (int r = 0; r < R; ++r) sums[b][r] = _mm512_setzero_ps();
  const uint8_t* rows = t.rows;
  for (int record = 0; record < t.records; ++record) {
    const uint8_t* w[B];
    for (int b = 0; b < B; ++b) {
      w[b] = t.streams[b] + static_cast<size_t>(record) * S::record_bytes;
      ask_ahead<B, R>(t, b, record);
    }
    for (int half = 0; half < 2; ++half, rows += R * QUANTIZED_BYTES) {
      const Group<R> group(rows);
      const uint8_t* codes[B];
      for (int b = 0; b < B; ++b) codes[b] = w[b] + half * S::half_codes;
      for (int part = 0; part < S::groups; ++part) {
        __m512i whole[B][R];
        multiply_codes<K, B, R>(codes, group, part, t.zero, whole);
        const int at = S::scales_at + (half * S::groups + part) * LANES * 2;
        for (int b = 0; b < B; ++b) {
          const __m512 scale = _mm512_cvtph_ps(
              _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w[b] + at)));
          for (int r = 0; r < R; ++r)
            sums[b][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[b][r]),
                                         _mm512_mul_ps(scale, _mm512_set1_ps(group.scales[r])),
                                         sums[b][r]);
          if constexpr (S::minimum) {
            const __m512 minimum = _mm512_cvtph_ps(_mm256_loadu_si256(
                reinterpret_cast<const __m256i*>(w[b] + at + S::scales_bytes)));
            for (int r = 0; r < R; ++r)
              sums[b][r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(group.scaled_sums[r]),
                                           sums[b][r]);
          }
        }
      }
    }
  }
  for (int b = 0; b < B; ++b)
    for (int r = 0; r < R; ++r) store_outputs(t, b, r, (Floats)sums[b][r]);
}

template <Kind K, int B, int R>
static void tile(const Tile& t) {
  if constexpr (static_cast<int>(K) < QUANTIZED_KINDS)
    quantized_tile<K, B, R>(t);
  else
    float_tile<K, B, R>(t);
}

// Four blocks at once for few rows (four far streams), two for many (registers).
#define HEADRACE_TILE_ROWS(K, B) \
  { tile<K, B, 1>, tile<K, B, 2>, tile<K, B, 3>, tile<K, B, 4>, tile<K, B, 5>, tile<K, B, 6> }
#define HEADRACE_TILES(K)                                                    \
  {                                                                          \
    HEADRACE_TILE_ROWS(K, 1), HEADRACE_TILE_ROWS(K, 2), {},                  \
        {tile<K, 4, 1>, tile<K, 4, 2>, tile<K, 4, 3>},                       \
  }

}  // namespace

const Kernels& avx512_kernels() {
  static const Kernels table = {
      "avx512-vnni",
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
