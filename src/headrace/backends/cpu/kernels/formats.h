// The file formats a weight may have (GGUF's names) and how one row of each decodes.
//
// Every quantized format is brought to one form: unsigned codes with w = scale * (code - zero), or
// w = scale * code + minimum, per group of 32 or 16 values. Packing (packed.h) and embedding look-up
// both read through this. Bytes are trusted here: sizes were checked when the file was opened.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headrace {

enum class Format { F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };

struct FormatFacts {
  const char* name;
  int block_values;
  int block_bytes;
  int bits;      // of a code as packed: 4 or 8; 0 for floats
  int group;     // values that share a scale: 32 or 16
  bool minimum;  // has a minimum per group; otherwise a fixed zero
  int zero;
};

// Throws std::invalid_argument for a name that is not in the list above.
Format format_named(const char* name);
const FormatFacts& facts(Format format);

inline size_t row_bytes(Format format, int64_t values) {
  const FormatFacts& f = facts(format);
  return static_cast<size_t>(values / f.block_values) * f.block_bytes;
}

// Codes [values], scales and (where there are any) minimums [values / group] of one row.
void decode_codes(Format format, const uint8_t* row, int values, uint8_t* codes, float* scales,
                  float* minimums);

// One row as floats.
void decode_floats(Format format, const uint8_t* row, int values, float* out);

float half_to_float(uint16_t bits);
uint16_t float_to_half(float value);  // round to nearest even

}  // namespace headrace
