#include "packed.h"

#include <cstring>
#include <stdexcept>
#include <thread>

namespace headrace {
namespace {

size_t record_bytes(const FormatFacts& f) {
  const size_t codes = RECORD_INPUTS * LANES * f.bits / 8;
  const size_t scales = RECORD_INPUTS / f.group * LANES * 2;
  return codes + scales * (f.minimum ? 2 : 1);
}

// Row r of the stacked parts.
const uint8_t* row_of(const std::vector<RawTensor>& parts, int r, size_t bytes) {
  for (const RawTensor& part : parts) {
    if (r < part.outputs) return part.data + static_cast<size_t>(r) * bytes;
    r -= part.outputs;
  }
  return nullptr;
}

struct DecodedRow {
  std::vector<uint8_t> codes;
  std::vector<float> scales, minimums;
};

// Writes one output (lane `c`) of a block's stream.
void scatter_row(const FormatFacts& f, const DecodedRow& row, int c, int records, size_t bytes,
                 uint8_t* stream) {
  const int half_codes = 32 * LANES * f.bits / 8;
  const int groups = RECORD_INPUTS / f.group;
  for (int r = 0; r < records; ++r) {
    uint8_t* record = stream + r * bytes;
    const uint8_t* codes = row.codes.data() + r * RECORD_INPUTS;
    // Four inputs of one output are neighbours in a register: one word each.
    for (int h = 0; h < 2; ++h, codes += 32) {
      uint8_t* to = record + h * half_codes + 4 * c;
      for (int i = 0; i < 8; ++i) {
        uint32_t low, high;
        std::memcpy(&low, codes + 4 * i, 4);
        if (f.bits == 4) {
          std::memcpy(&high, codes + 4 * ++i, 4);
          low |= high << 4;
        }
        std::memcpy(to + (f.bits == 4 ? i / 2 : i) * 64, &low, 4);
      }
    }
    uint16_t* scales = reinterpret_cast<uint16_t*>(record + 2 * half_codes);
    uint16_t* minimums = scales + groups * LANES;
    for (int g = 0; g < groups; ++g) {
      scales[g * LANES + c] = float_to_half(row.scales[r * groups + g]);
      if (f.minimum) minimums[g * LANES + c] = float_to_half(row.minimums[r * groups + g]);
    }
  }
}

void pack_quantized(const std::vector<RawTensor>& parts, Packed& out, int first, int last) {
  const Format format = parts[0].format;
  const FormatFacts& f = facts(format);
  const size_t source_bytes = row_bytes(format, out.inputs);
  const int padded = out.records * RECORD_INPUTS;
  const size_t bytes = record_bytes(f);
  DecodedRow row{std::vector<uint8_t>(padded), std::vector<float>(padded / f.group),
                 std::vector<float>(padded / f.group)};
  // Padding inputs have scale 0 and meet activations of 0: their codes do not matter.
  for (int b = first; b < last; ++b)
    for (int c = 0; c < LANES && b * LANES + c < out.outputs; ++c) {
      decode_codes(format, row_of(parts, b * LANES + c, source_bytes), out.inputs,
                   row.codes.data(), row.scales.data(), row.minimums.data());
      scatter_row(f, row, c, out.records, bytes, out.data.data() + b * out.stream_bytes);
    }
}

void pack_floats(const std::vector<RawTensor>& parts, Packed& out, int first, int last) {
  const int size = facts(parts[0].format).block_bytes;
  const size_t source_bytes = row_bytes(parts[0].format, out.inputs);
  for (int b = first; b < last; ++b)
    for (int c = 0; c < LANES && b * LANES + c < out.outputs; ++c) {
      const uint8_t* row = row_of(parts, b * LANES + c, source_bytes);
      uint8_t* stream = out.data.data() + b * out.stream_bytes;
      for (int k = 0; k < out.inputs; ++k)
        std::memcpy(stream + static_cast<size_t>(k * LANES + c) * size, row + k * size, size);
    }
}

}  // namespace

Kind kind_of(Format format) {
  const FormatFacts& f = facts(format);
  switch (format) {
    case Format::F32: return Kind::F32;
    case Format::F16: return Kind::F16;
    case Format::BF16: return Kind::BF16;
    default: break;
  }
  if (f.bits == 4) return f.minimum ? Kind::U4Minimum : Kind::U4Zero;
  if (f.group == 16) return Kind::U8Zero16;
  return f.minimum ? Kind::U8Minimum : Kind::U8Zero;
}

const char* kind_name(Kind kind) {
  constexpr const char* NAMES[] = {"u4",   "u4+minimum", "u8",  "u8+minimum",
                                   "u8x16", "f32",       "f16", "bf16"};
  return NAMES[static_cast<int>(kind)];
}

Packed pack(const std::vector<RawTensor>& parts, int threads) {
  if (parts.empty()) throw std::invalid_argument("pack: no tensors");
  int outputs = 0;
  for (const RawTensor& part : parts) {
    if (part.format != parts[0].format || part.inputs != parts[0].inputs)
      throw std::invalid_argument("pack: tensors of one matrix differ in format or width");
    outputs += part.outputs;
  }
  const FormatFacts& f = facts(parts[0].format);
  const int inputs = parts[0].inputs;
  if (inputs % f.block_values) throw std::invalid_argument("pack: rows do not hold whole blocks");

  Packed out{kind_of(parts[0].format), outputs, inputs, f.zero, (outputs + LANES - 1) / LANES,
             (inputs + RECORD_INPUTS - 1) / RECORD_INPUTS, 0, {}};
  const bool quantized = is_quantized(out.kind);
  out.stream_bytes = quantized ? out.records * record_bytes(f)
                               : static_cast<size_t>(inputs) * LANES * f.block_bytes;
  out.data = Buffer(out.bytes(), true);

  // Each thread first touches what it is likely to read later: the same share of the outputs.
  std::vector<std::thread> workers;
  for (int t = 0; t < threads; ++t) {
    const int first = static_cast<int>(static_cast<int64_t>(out.blocks) * t / threads);
    const int last = static_cast<int>(static_cast<int64_t>(out.blocks) * (t + 1) / threads);
    auto share = [&parts, &out, quantized, first, last] {
      quantized ? pack_quantized(parts, out, first, last) : pack_floats(parts, out, first, last);
    };
    if (t + 1 == threads)
      share();
    else
      workers.emplace_back(share);
  }
  for (auto& worker : workers) worker.join();
  return out;
}

}  // namespace headrace
