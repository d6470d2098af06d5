// Weights as the products read them: one contiguous stream per block of 16 outputs.
//
// Quantized kinds. A stream is a run of records, each covering 64 inputs (two halves of 32):
//   4 bits   256 B codes, 256 B codes, scales [, minimums]
//   8 bits   512 B codes, 512 B codes, scales [, minimums]
// with a fp16 scale (and minimum) for each output and each group of 32 or 16 inputs.
//   4-bit code register i (0..3), byte 4c+b: low nibble  = output c, input 8i + b
//                                            high nibble = output c, input 8i + 4 + b
//   8-bit code register i (0..7), byte 4c+b: output c, input 4i + b
// so that each register holds "16 outputs x 4 inputs" operands of an int8 dot product.
//
// Float kinds. A stream is [inputs][16] values as they were in the file.
//
// Outputs beyond the last and inputs beyond the last are zero. The layout is the same for every
// instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "buffer.h"
#include "formats.h"

namespace headrace {

constexpr int LANES = 16;          // outputs in a block, values in a vector
constexpr int RECORD_INPUTS = 64;  // inputs in a record

enum class Kind { U4Zero, U4Minimum, U8Zero, U8Minimum, U8Zero16, F32, F16, BF16 };
constexpr int FOUR_BIT_KINDS = 2;  // the first of the
constexpr int QUANTIZED_KINDS = 5;
constexpr int FLOAT_KINDS = 3;

inline bool is_quantized(Kind kind) { return static_cast<int>(kind) < QUANTIZED_KINDS; }
Kind kind_of(Format format);
const char* kind_name(Kind kind);

// A tensor as it lies in the mapped file.
struct RawTensor {
  Format format;
  int outputs;
  int inputs;
  const uint8_t* data;
};

struct Packed {
  Kind kind;
  int outputs;
  int inputs;
  int zero;             // of the zero kinds
  int blocks;           // of 16 outputs
  int records;          // in a stream (quantized kinds)
  size_t stream_bytes;  // from one block's stream to the next
  Buffer data;

  const uint8_t* stream(int block) const { return data.data() + block * stream_bytes; }
  size_t bytes() const { return blocks * stream_bytes; }
};

// One matrix from tensors stacked by output; all of one format and one width.
Packed pack(const std::vector<RawTensor>& parts, int threads);

}  // namespace headrace
