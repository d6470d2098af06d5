// Tiles: a few rows times a few blocks of 16 outputs, with all sums in registers. Included by each
// path, after a
//
//   struct Unit {
//     static constexpr int outputs;            // in a register: 16, or a half or a quarter of a block
//     static constexpr int rows[4];            // most rows of a tile of 1, 2, 3 and 4 blocks; 0: none
//     static constexpr int registers(int rows);  // of a block that are summed at once
//     static constexpr int eight_bit_offset;   // what codes8() takes away from 8-bit codes
//     static constexpr bool unpacks;           // many rows share nibbles that were taken apart once
//     using Codes, Sums, Values;               // registers of bytes, of int32, of floats
//     static Codes codes8(const uint8_t*);     // "outputs x 4 inputs": 8 bits each
//     static Codes low4(const uint8_t*), high4(const uint8_t*);  // the same from nibbles
//     static Codes same4(const int8_t*);       // four activations, for every output
//     static Sums start(int32_t);
//     static Sums dot(Sums, Codes weights, Codes activations);   // of 8-bit codes
//     static Sums dot4(Sums, Codes weights, Codes activations);  // of 4-bit ones
//     static Values factors(const uint16_t*);  // halves, one per output
//     static Values times(Values, float);
//     static Values scaled(Sums, Values, Values sums);  // sums + whole * scale
//     static Values added(Values, float, Values sums);  // sums + minimum * scaled sum
//   };
//
// that says what the instruction set does. Every tile does the same float operations in the same
// order for a row, whatever its number of rows and blocks.
#pragma once

#include <utility>

#include "shape.h"

namespace headrace {
namespace {

// Where a tile finds 4-bit codes. Taking nibbles apart is a sixth of its work, and every row tile of
// a panel would do it again: the first one keeps what it took apart for the others.
enum class Nibbles { Packed, Unpacking, Unpacked };

// Integer sums of U registers of outputs x R rows over the inputs that share a scale: `codes` points
// at a group's codes of each register, `bytes` at the group's unpacked ones. The zero point is what
// the sums start from.
template <Kind K, Nibbles N, int U, int R>
HEADRACE_INLINE void multiply_codes(const uint8_t* const (&codes)[U], uint8_t* bytes,
                                    const Group<R>& group, int part, int zero,
                                    Unit::Sums (&sums)[U][R]) {
  using S = Shape<K>;
  constexpr int offset = S::four_bits ? 0 : Unit::eight_bit_offset;
  for (int r = 0; r < R; ++r) {
    // A minimum takes the place of a zero: none but the offset is left.
    const int32_t from = S::minimum && offset == 0
                             ? 0
                             : -((S::minimum ? 0 : zero) - offset) * group.template sum<K>(r, part);
    for (int u = 0; u < U; ++u) sums[u][r] = Unit::start(from);
  }
  constexpr int fours = 32 / S::groups / 4;
  const int8_t* x = group.codes + part * fours * 4;
  for (int i = 0; i < fours; ++i) {
    typename Unit::Codes w[U];
    for (int u = 0; u < U; ++u) {
      if constexpr (N == Nibbles::Unpacked)
        w[u] = Unit::codes8(bytes + (i * U + u) * 64);
      else if constexpr (S::four_bits)
        w[u] = i % 2 ? Unit::high4(codes[u] + 64 * (i / 2)) : Unit::low4(codes[u] + 64 * (i / 2));
      else
        w[u] = Unit::codes8(codes[u] + 64 * (part * fours + i));
      if constexpr (N == Nibbles::Unpacking)
        std::memcpy(bytes + (i * U + u) * 64, &w[u], sizeof w[u]);
    }
    for (int r = 0; r < R; ++r) {
      const typename Unit::Codes a = Unit::same4(x + r * QUANTIZED_GROUP + 4 * i);
      for (int u = 0; u < U; ++u)
        sums[u][r] = S::four_bits ? Unit::dot4(sums[u][r], w[u], a) : Unit::dot(sums[u][r], w[u], a);
    }
  }
}

// Scales or minimums: halves as they were packed, or floats as the first tile kept them.
template <Nibbles N>
HEADRACE_INLINE Unit::Values read_factors(const uint8_t* halves, uint8_t* kept) {
  Unit::Values values;
  if constexpr (N == Nibbles::Unpacked)
    std::memcpy(&values, kept, sizeof values);
  else
    values = Unit::factors(reinterpret_cast<const uint16_t*>(halves));
  if constexpr (N == Nibbles::Unpacking) std::memcpy(kept, &values, sizeof values);
  return values;
}

// One pass: U registers of outputs, of a block each; or where a block needs several registers, all of
// one block, from output `lane` on.
template <Kind K, Nibbles N, int U, int R>
HEADRACE_INLINE void quantized_pass(const Tile& t, int block, int lane,
                                    Unit::Values (&sums)[U][R]) {
  using S = Shape<K>;
  constexpr bool whole_blocks = Unit::outputs == LANES;
  const auto lane_of = [lane](int u) { return whole_blocks ? 0 : lane + u * Unit::outputs; };
  for (int u = 0; u < U; ++u)
    for (int r = 0; r < R; ++r) sums[u][r] = typename Unit::Values{};
  const uint8_t* rows = t.rows;
  uint8_t* bytes = t.unpacked;
  for (int record = 0; record < t.records; ++record) {
    const uint8_t* w[U];
    for (int u = 0; u < U; ++u) {
      const int b = whole_blocks ? block + u : block;
      w[u] = t.streams[b] + static_cast<size_t>(record) * S::record_bytes;
      if (lane == 0 && (whole_blocks || u == 0)) ask_ahead(t, b, record);
    }
    for (int half = 0; half < 2; ++half, rows += R * QUANTIZED_BYTES, bytes += U * S::unpacked_bytes) {
      const Group<R> group(rows);
      const uint8_t* codes[U];
      for (int u = 0; u < U; ++u) codes[u] = w[u] + half * S::half_codes + lane_of(u) * 4;
      for (int part = 0; part < S::groups; ++part) {
        typename Unit::Sums whole[U][R];
        multiply_codes<K, N, U, R>(codes, bytes, group, part, t.zero, whole);
        for (int u = 0; u < U; ++u) {
          const int at = S::scales_at + ((half * S::groups + part) * LANES + lane_of(u)) * 2;
          uint8_t* factors = bytes + U * 512 + u * 64;
          const auto scale = read_factors<N>(w[u] + at, factors);
          for (int r = 0; r < R; ++r)
            sums[u][r] = Unit::scaled(whole[u][r], Unit::times(scale, group.scales[r]), sums[u][r]);
          if constexpr (S::minimum) {
            const auto minimum = read_factors<N>(w[u] + at + S::scales_bytes, factors + U * 64);
            for (int r = 0; r < R; ++r)
              sums[u][r] = Unit::added(minimum, group.scaled_sums[r], sums[u][r]);
          }
        }
      }
    }
  }
}

template <Kind K, Nibbles N, int R, int... Pass>
HEADRACE_INLINE void quantized_passes(const Tile& t, int block, float (&done)[R][LANES],
                                      std::integer_sequence<int, Pass...>) {
  constexpr int U = Unit::registers(R);
  const auto pass = [&](int lane) {
    typename Unit::Values sums[U][R];
    quantized_pass<K, N, U, R>(t, block, lane, sums);
    for (int u = 0; u < U; ++u)
      for (int r = 0; r < R; ++r)
        std::memcpy(done[r] + lane + u * Unit::outputs, &sums[u][r], sizeof sums[u][r]);
  };
  (pass(Pass * U * Unit::outputs), ...);
}

template <Kind K, Nibbles N, int B, int R>
HEADRACE_INLINE void quantized_tile(const Tile& t) {
  if constexpr (Unit::outputs == LANES) {
    typename Unit::Values sums[B][R];
    quantized_pass<K, N, B, R>(t, 0, 0, sums);
    for (int b = 0; b < B; ++b)
      for (int r = 0; r < R; ++r) {
        Floats all;
        std::memcpy(&all, &sums[b][r], sizeof all);
        store_outputs(t, b, r, all);
      }
  } else {
    // So many registers of a block after the others, that the sums of all rows fit.
    constexpr int passes = LANES / Unit::outputs / Unit::registers(R);
    for (int b = 0; b < B; ++b) {
      alignas(64) float done[R][LANES];
      quantized_passes<K, N, R>(t, b, done, std::make_integer_sequence<int, passes>{});
      for (int r = 0; r < R; ++r) store_outputs(t, b, r, load(done[r]));
    }
  }
}

template <Kind K>
using Weight = std::conditional_t<K == Kind::F32, float,
                                  std::conditional_t<K == Kind::F16, Half, Bfloat>>;

// Float kinds: [inputs][16] weights, one multiply-add per input.
template <Kind K, int B, int R>
HEADRACE_INLINE void float_tile(const Tile& t) {
  FloatRegister sums[B][R][PARTS];
  for (int b = 0; b < B; ++b)
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < PARTS; ++p) sums[b][r][p] = splat_register(0.0f);
  for (int k = 0; k < t.inputs; ++k) {
    FloatRegister w[B][PARTS];
    for (int b = 0; b < B; ++b)
      for (int p = 0; p < PARTS; ++p)
        w[b][p] = load_register(reinterpret_cast<const Weight<K>*>(t.streams[b]) +
                                static_cast<size_t>(k) * LANES + p * PART_LANES);
    for (int r = 0; r < R; ++r) {
      const FloatRegister x = splat_register(t.floats[r * t.floats_stride + k]);
      for (int b = 0; b < B; ++b)
        for (int p = 0; p < PARTS; ++p) sums[b][r][p] = multiply_add(w[b][p], x, sums[b][r][p]);
    }
  }
  for (int b = 0; b < B; ++b)
    for (int r = 0; r < R; ++r) {
      Floats all;
      std::memcpy(&all, &sums[b][r], sizeof all);
      store_outputs(t, b, r, all);
    }
}

template <Kind K, Nibbles N, int B, int R>
static void tile(const Tile& t) {
  if constexpr (static_cast<int>(K) < QUANTIZED_KINDS)
    quantized_tile<K, N, B, R>(t);
  else
    float_tile<K, B, R>(t);
}

}  // namespace
}  // namespace headrace
