// Drawing a token from a row of logits. The order of operations is that of the reference backend
// (backends/reference/sampling.py): the same logits and the same uniform give the same token.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels.h"
#include "ranked.h"

namespace headrace {

// What is done to a row's logits before drawing. Ids lie in the vocabulary.
struct Adjustment {
  struct Valued {
    std::span<const int32_t> ids;
    std::span<const float> values;  // one per id
  };
  float repetition, presence, frequency;
  bool limited;  // only `allowed` may be drawn
  bool masked;   // only tokens whose bit is set in `mask`; those past its end are dropped
  Valued bias;
  std::span<const int32_t> allowed, banned;
  std::span<const int32_t> seen;  // may hold an id more than once
  Valued counts;
  std::span<const uint8_t> mask;  // token t: bit t % 8 of byte t / 8
};

struct DrawParams {
  double temperature, top_p, min_p, typical_p, uniform;
  int top_k;                     // 0: all
  const Adjustment* adjustment;  // null: none
};

// A draw's numbers as Python passes them, in the order of core/sampling.py's table.
using Filters = std::array<double, 5>;

inline DrawParams draw_of(const Filters& filters, double uniform, int vocabulary) {
  const auto [temperature, top_p, min_p, typical_p, top_k] = filters;
  // A top_k of the whole vocabulary or more keeps all, and may not fit an int.
  const int kept = top_k > 0 && top_k < vocabulary ? static_cast<int>(top_k) : 0;
  return {temperature, top_p, min_p, typical_p, uniform, kept, nullptr};
}

// Returned in place of a token if none can be drawn.
enum Failure : int32_t { NOT_NUMBERS = -1, NOTHING_LEFT = -2, OUT_OF_RANGE = -3 };

class Sampler {
 public:
  Sampler(const Kernels& kernels, int vocabulary);

  // Sets the row for all functions below; false if its logits are not finite.
  bool read(const float* logits);
  // Under the model's own distribution, without adjustments.
  float logprob(int token) const;
  // A token, or a Failure.
  int32_t draw(const DrawParams& params);
  // The n likeliest, best first, of equals the lower id.
  void top(int n, int32_t* tokens, float* logprobs);

 private:
  void adjust(const Adjustment& adjustment);
  void keep_masked(std::span<const uint8_t> mask);
  int choose(const float* logits, float highest, const DrawParams& params);
  double collect_enough(const float* logits, float least, const DrawParams& params);
  void collect(const float* logits, float least);
  void keep_top(int k);
  void keep_typical(double mass);
  double total() const;

  const Kernels& kernels_;
  const int vocabulary_;
  const float* logits_ = nullptr;
  float highest_ = 0;
  double log_sum_ = 0;
  std::vector<float> adjusted_;
  std::vector<uint32_t> penalized_;  // by id: the number of the last row in which it was
  uint32_t row_number_ = 0;
  std::vector<float> weights_;  // exp((logit - highest) / temperature), by id
  std::vector<Candidate> candidates_;
  Ranking ranking_;
};

}  // namespace headrace
