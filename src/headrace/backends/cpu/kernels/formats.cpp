#include "formats.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace headrace {
namespace {

constexpr FormatFacts FACTS[] = {
    {"F32", 1, 4, 0, 0, false, 0},      {"F16", 1, 2, 0, 0, false, 0},
    {"BF16", 1, 2, 0, 0, false, 0},     {"Q4_0", 32, 18, 4, 32, false, 8},
    {"Q4_1", 32, 20, 4, 32, true, 0},   {"Q5_0", 32, 22, 8, 32, false, 16},
    {"Q5_1", 32, 24, 8, 32, true, 0},   {"Q8_0", 32, 34, 8, 32, false, 128},
    {"Q4_K", 256, 144, 4, 32, true, 0}, {"Q5_K", 256, 176, 8, 32, true, 0},
    {"Q6_K", 256, 210, 8, 16, false, 32},
};

uint16_t read16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}

uint32_t read32(const uint8_t* p) {
  uint32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

// 32 nibbles in 16 bytes: the low ones first, then the high ones.
void nibbles(const uint8_t* p, uint8_t* codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = p[i] & 0x0f;
    codes[i + 16] = p[i] >> 4;
  }
}

void fifth_bits(uint32_t bits, uint8_t* codes) {
  for (int i = 0; i < 32; ++i) codes[i] |= static_cast<uint8_t>(((bits >> i) & 1) << 4);
}

// The K formats keep eight 6-bit scales and eight 6-bit minimums in 12 bytes.
void six_bit_pairs(const uint8_t* p, int j, int& scale, int& minimum) {
  if (j < 4) {
    scale = p[j] & 63;
    minimum = p[j + 4] & 63;
  } else {
    scale = (p[j + 4] & 0x0f) | ((p[j - 4] >> 6) << 4);
    minimum = (p[j + 4] >> 4) | ((p[j] >> 6) << 4);
  }
}

// Q4_K and Q5_K: d, dmin, 12 bytes of scales, [Q5_K: 32 bytes of fifth bits], 128 bytes of nibbles;
// each 32 bytes of nibbles hold two groups of 32, low nibbles first.
void k_block(const uint8_t* p, bool five_bits, uint8_t* codes, float* scales, float* minimums) {
  const float d = half_to_float(read16(p)), dmin = half_to_float(read16(p + 2));
  const uint8_t* fifth = p + 16;
  const uint8_t* quants = p + 16 + (five_bits ? 32 : 0);
  for (int j = 0; j < 8; ++j) {
    int scale, minimum;
    six_bit_pairs(p + 4, j, scale, minimum);
    scales[j] = d * static_cast<float>(scale);
    minimums[j] = -dmin * static_cast<float>(minimum);
    for (int i = 0; i < 32; ++i) {
      const uint8_t byte = quants[(j / 2) * 32 + i];
      uint8_t code = (j % 2) ? byte >> 4 : byte & 0x0f;
      if (five_bits) code |= static_cast<uint8_t>(((fifth[i] >> j) & 1) << 4);
      codes[j * 32 + i] = code;
    }
  }
}

// Q6_K: 128 bytes of low nibbles, 64 of high pairs, 16 signed scales, d; groups of 16.
void six_block(const uint8_t* p, uint8_t* codes, float* scales) {
  const uint8_t* low = p;
  const uint8_t* high = p + 128;
  const float d = half_to_float(read16(p + 208));
  for (int j = 0; j < 16; ++j)
    scales[j] = d * static_cast<float>(static_cast<int8_t>(p[192 + j]));
  for (int half = 0; half < 2; ++half) {
    const uint8_t* l = low + half * 64;
    const uint8_t* h = high + half * 32;
    uint8_t* c = codes + half * 128;
    for (int i = 0; i < 32; ++i) {
      c[i] = static_cast<uint8_t>((l[i] & 0x0f) | ((h[i] & 3) << 4));
      c[i + 32] = static_cast<uint8_t>((l[i + 32] & 0x0f) | (((h[i] >> 2) & 3) << 4));
      c[i + 64] = static_cast<uint8_t>((l[i] >> 4) | (((h[i] >> 4) & 3) << 4));
      c[i + 96] = static_cast<uint8_t>((l[i + 32] >> 4) | (((h[i] >> 6) & 3) << 4));
    }
  }
}

void decode_block(Format format, const uint8_t* p, uint8_t* codes, float* scales,
                  float* minimums) {
  switch (format) {
    case Format::Q4_0:
      scales[0] = half_to_float(read16(p));
      nibbles(p + 2, codes);
      break;
    case Format::Q4_1:
      scales[0] = half_to_float(read16(p));
      minimums[0] = half_to_float(read16(p + 2));
      nibbles(p + 4, codes);
      break;
    case Format::Q5_0:
      scales[0] = half_to_float(read16(p));
      nibbles(p + 6, codes);
      fifth_bits(read32(p + 2), codes);
      break;
    case Format::Q5_1:
      scales[0] = half_to_float(read16(p));
      minimums[0] = half_to_float(read16(p + 2));
      nibbles(p + 8, codes);
      fifth_bits(read32(p + 4), codes);
      break;
    case Format::Q8_0:
      scales[0] = half_to_float(read16(p));
      for (int i = 0; i < 32; ++i) codes[i] = p[2 + i] ^ 0x80;  // signed to offset by 128
      break;
    case Format::Q4_K:
      k_block(p, false, codes, scales, minimums);
      break;
    case Format::Q5_K:
      k_block(p, true, codes, scales, minimums);
      break;
    case Format::Q6_K:
      six_block(p, codes, scales);
      break;
    default:
      throw std::logic_error("decode_codes: a float format has no codes");
  }
}

}  // namespace

Format format_named(const char* name) {
  for (size_t i = 0; i < std::size(FACTS); ++i)
    if (std::strcmp(FACTS[i].name, name) == 0) return static_cast<Format>(i);
  throw std::invalid_argument(std::string("unknown weight format: ") + name);
}

const FormatFacts& facts(Format format) { return FACTS[static_cast<int>(format)]; }

void decode_codes(Format format, const uint8_t* row, int values, uint8_t* codes, float* scales,
                  float* minimums) {
  const FormatFacts& f = facts(format);
  const int groups = f.block_values / f.group;
  for (int b = 0; b < values / f.block_values; ++b)
    decode_block(format, row + static_cast<size_t>(b) * f.block_bytes, codes + b * f.block_values,
                 scales + b * groups, minimums ? minimums + b * groups : nullptr);
}

void decode_floats(Format format, const uint8_t* row, int values, float* out) {
  switch (format) {
    case Format::F32:
      std::memcpy(out, row, static_cast<size_t>(values) * 4);
      return;
    case Format::F16:
      for (int i = 0; i < values; ++i) out[i] = half_to_float(read16(row + 2 * i));
      return;
    case Format::BF16:
      for (int i = 0; i < values; ++i) {
        const uint32_t bits = static_cast<uint32_t>(read16(row + 2 * i)) << 16;
        std::memcpy(out + i, &bits, 4);
      }
      return;
    default:
      break;
  }
  const FormatFacts& f = facts(format);
  uint8_t codes[256];
  float scales[16], minimums[16];
  for (int b = 0; b < values / f.block_values; ++b) {
    decode_block(format, row + static_cast<size_t>(b) * f.block_bytes, codes, scales, minimums);
    for (int i = 0; i < f.block_values; ++i) {
      const int g = i / f.group;
      const float w = f.minimum ? scales[g] * static_cast<float>(codes[i]) + minimums[g]
                                : scales[g] * static_cast<float>(codes[i] - f.zero);
      out[b * f.block_values + i] = w;
    }
  }
}

float half_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1f;
  uint32_t mantissa = bits & 0x3ff;
  uint32_t out;
  if (exponent == 31) {
    out = sign | 0x7f800000u | (mantissa << 13);
  } else if (exponent != 0) {
    out = sign | ((exponent + 112) << 23) | (mantissa << 13);
  } else if (mantissa == 0) {
    out = sign;
  } else {  // a denormal half is a normal float
    int shift = 0;
    while (!(mantissa & 0x400)) {
      mantissa <<= 1;
      ++shift;
    }
    out = sign | (static_cast<uint32_t>(113 - shift) << 23) | ((mantissa & 0x3ff) << 13);
  }
  float value;
  std::memcpy(&value, &out, 4);
  return value;
}

uint16_t float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude >= 0x7f800000) return sign | (magnitude > 0x7f800000 ? 0x7e00 : 0x7c00);
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // rounds past 65504
  if (magnitude < 0x33000000) return sign;            // rounds to zero
  if (magnitude < 0x38800000) {                       // a denormal half: shift with rounding
    const int shift = 126 - static_cast<int>(magnitude >> 23);
    const uint32_t mantissa = (magnitude & 0x7fffff) | 0x800000;
    const uint32_t kept = mantissa >> shift, rest = mantissa & ((1u << shift) - 1);
    const uint32_t halfway = 1u << (shift - 1);
    const uint32_t up = rest > halfway || (rest == halfway && (kept & 1));
    return sign | static_cast<uint16_t>(kept + up);
  }
  const uint32_t rebased = magnitude - 0x38000000;
  return sign | static_cast<uint16_t>((rebased + 0xfff + ((rebased >> 13) & 1)) >> 13);
}

}  // namespace headrace
