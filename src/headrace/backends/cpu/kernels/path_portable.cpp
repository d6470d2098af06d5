// The portable path: plain loops over the same layout, for any processor. Slow and sure.
#include "attention.h"
#include "elementwise.h"
#include "quantize.h"
#include "tile.h"

namespace headrace {
namespace {

// Code of output c, input k of the 32 at `codes`.
template <Kind K>
HEADRACE_INLINE int code_at(const uint8_t* codes, int c, int k) {
  if constexpr (Shape<K>::four_bits) {
    const uint8_t byte = codes[(k / 8) * 64 + 4 * c + k % 4];
    return (k % 8) < 4 ? byte & 0x0f : byte >> 4;
  } else {
    return codes[(k / 4) * 64 + 4 * c + k % 4];
  }
}

template <Kind K, int R>
HEADRACE_INLINE void quantized_tile(const Tile& t, int b) {
  using S = Shape<K>;
  constexpr int inputs = 32 / S::groups;
  float sums[R][LANES] = {};
  const uint8_t* rows = t.rows;
  for (int record = 0; record < t.records; ++record) {
    const uint8_t* w = t.streams[b] + static_cast<size_t>(record) * S::record_bytes;
    for (int half = 0; half < 2; ++half, rows += R * QUANTIZED_BYTES) {
      const Group<R> group(rows);
      for (int part = 0; part < S::groups; ++part) {
        const uint16_t* scales = reinterpret_cast<const uint16_t*>(w + S::scales_at) +
                                 (half * S::groups + part) * LANES;
        const uint16_t* minimums = scales + S::scales_bytes / 2;
        for (int c = 0; c < LANES; ++c) {
          const float scale = half_to_float(scales[c]);
          int code[inputs];
          for (int k = 0; k < inputs; ++k)
            code[k] = code_at<K>(w + half * S::half_codes, c, part * inputs + k);
          for (int r = 0; r < R; ++r) {
            const int8_t* x = group.codes + r * QUANTIZED_GROUP + part * inputs;
            int32_t whole = S::minimum ? 0 : -t.zero * group.template sum<K>(r, part);
            for (int k = 0; k < inputs; ++k) whole += code[k] * x[k];
            // The same operations, in the same order, as the vector paths.
            sums[r][c] = std::fma(static_cast<float>(whole), scale * group.scales[r], sums[r][c]);
            if constexpr (S::minimum)
              sums[r][c] = std::fma(half_to_float(minimums[c]), group.scaled_sums[r], sums[r][c]);
          }
        }
      }
    }
  }
  for (int r = 0; r < R; ++r) store_outputs(t, b, r, load(sums[r]));
}

template <Kind K, int B, int R>
static void tile(const Tile& t) {
  if constexpr (static_cast<int>(K) < QUANTIZED_KINDS)
    quantized_tile<K, R>(t, 0);
  else
    float_tile<K, B, R>(t);
}

#define HEADRACE_TILES(K) \
  {                       \
    { tile<K, 1, 1>, tile<K, 1, 2>, tile<K, 1, 3>, tile<K, 1, 4> } \
  }

}  // namespace

const Kernels& portable_kernels() {
  static const Kernels table = {
      "portable",
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
