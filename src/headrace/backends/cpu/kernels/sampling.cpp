#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace headrace {
namespace {

// A nucleus rarely holds more; sort this many, and more only if they do not reach far enough.
constexpr size_t FIRST_SORTED = 64;
constexpr size_t GROWTH = 16;

}  // namespace

Sampler::Sampler(const Kernels& kernels, int vocabulary)
    : kernels_(kernels), vocabulary_(vocabulary) {}

float Sampler::score(const float* logits, int token) const {
  float highest;
  double log_sum;
  kernels_.log_sum_exp(logits, vocabulary_, &highest, &log_sum);
  return static_cast<float>(static_cast<double>(logits[token] - highest) - log_sum);
}

Drawn Sampler::draw(const float* logits, const DrawParams& params) {
  float highest;
  double log_sum;
  kernels_.log_sum_exp(logits, vocabulary_, &highest, &log_sum);
  // NaN or infinity among the logits: there is no distribution, and nothing to sort by.
  if (!std::isfinite(log_sum) || !std::isfinite(highest)) return {NO_TOKEN, NAN};
  const int token =
      params.temperature == 0.0f
          ? static_cast<int>(std::find(logits, logits + vocabulary_, highest) - logits)
          : choose(logits, highest, params);
  return {token, static_cast<float>(static_cast<double>(logits[token] - highest) - log_sum)};
}

int Sampler::choose(const float* logits, float highest, const DrawParams& params) {
  const auto before = [logits](int a, int b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  };
  weights_.resize(vocabulary_);
  // A temperature next to nothing must not become infinity: 0 * infinity is no number.
  const float sharpness = std::min(1.0f / params.temperature, 1e30f);
  kernels_.exponentials(logits, highest, sharpness, vocabulary_, weights_.data());
  ids_.resize(vocabulary_);
  std::iota(ids_.begin(), ids_.end(), 0);
  if (params.top_k > 0 && params.top_k < vocabulary_) {
    std::nth_element(ids_.begin(), ids_.begin() + params.top_k - 1, ids_.end(), before);
    ids_.resize(params.top_k);
  }
  if (params.min_p > 0)  // the largest weight is 1
    std::erase_if(ids_, [&](int id) { return weights_[id] < params.min_p; });
  double total = 0;
  for (const int id : ids_) total += weights_[id];

  // Walk the ids from the likeliest on, sorting only as far as the walk goes.
  const double wanted = params.top_p < 1.0f ? params.top_p * total : params.uniform * total;
  size_t sorted = 0, end = 0;
  double mass = 0;
  while (end < ids_.size()) {
    if (end == sorted) {
      const size_t next = std::min(ids_.size(), sorted == 0 ? FIRST_SORTED : sorted * GROWTH);
      if (next < ids_.size())
        std::nth_element(ids_.begin() + sorted, ids_.begin() + next - 1, ids_.end(), before);
      std::sort(ids_.begin() + sorted, ids_.begin() + next, before);
      sorted = next;
    }
    mass += weights_[ids_[end++]];
    if (params.top_p < 1.0f ? mass >= wanted : mass > wanted) break;
  }
  if (params.top_p >= 1.0f) return ids_[end - 1];
  double walked = 0;
  for (size_t i = 0; i < end; ++i) {
    walked += weights_[ids_[i]];
    if (walked > params.uniform * mass) return ids_[i];
  }
  return ids_[end - 1];
}

}  // namespace headrace
