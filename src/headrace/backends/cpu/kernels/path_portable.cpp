// The portable path: plain loops over the same layout, for any processor. Slow and sure.
#include "kernels.h"

namespace headrace {
namespace {

struct Unit {
  static constexpr int outputs = 16;
  static constexpr int rows[] = {4, 0, 0, 0};
  static constexpr int registers(int /*rows*/) { return 1; }
  static constexpr bool unpacks = false;
  static constexpr int eight_bit_offset = 0;
  struct Codes {
    int16_t at[4 * LANES];  // wide enough for a byte of either sign
  };
  struct Sums {
    int32_t at[LANES];
  };
  struct Values {
    float at[LANES] = {};
  };

  template <typename Decode>
  static inline Codes each(const uint8_t* p, Decode decode) {
    Codes codes;
    for (int i = 0; i < 4 * LANES; ++i) codes.at[i] = static_cast<int16_t>(decode(p[i]));
    return codes;
  }
  static inline Codes codes8(const uint8_t* p) {
    return each(p, [](uint8_t byte) { return byte; });
  }
  static inline Codes low4(const uint8_t* p) {
    return each(p, [](uint8_t byte) { return byte & 0x0f; });
  }
  static inline Codes high4(const uint8_t* p) {
    return each(p, [](uint8_t byte) { return byte >> 4; });
  }
  static inline Codes same4(const int8_t* p) {
    Codes codes;
    for (int i = 0; i < 4 * LANES; ++i) codes.at[i] = p[i % 4];
    return codes;
  }
  static inline Sums start(int32_t x) {
    Sums sums;
    for (int32_t& sum : sums.at) sum = x;
    return sums;
  }
  static inline Sums dot(Sums sums, const Codes& w, const Codes& a) {
    for (int c = 0; c < LANES; ++c)
      for (int i = 0; i < 4; ++i) sums.at[c] += w.at[4 * c + i] * a.at[4 * c + i];
    return sums;
  }
  static inline Sums dot4(const Sums& sums, const Codes& w, const Codes& a) {
    return dot(sums, w, a);
  }
  static inline Values factors(const uint16_t* p) {
    Values v;
    for (int c = 0; c < LANES; ++c) v.at[c] = half_to_float(p[c]);
    return v;
  }
  static inline Values times(Values v, float x) {
    for (float& one : v.at) one *= x;
    return v;
  }
  static inline Values scaled(const Sums& whole, const Values& scale, Values sums) {
    for (int c = 0; c < LANES; ++c) sums.at[c] += static_cast<float>(whole.at[c]) * scale.at[c];
    return sums;
  }
  static inline Values added(const Values& minimum, float x, Values sums) {
    for (int c = 0; c < LANES; ++c) sums.at[c] += minimum.at[c] * x;
    return sums;
  }
};

}  // namespace
}  // namespace headrace

#include "table.h"

namespace headrace {

const Kernels& portable_kernels() {
  static const Kernels table = make_table("portable");
  return table;
}

}  // namespace headrace
