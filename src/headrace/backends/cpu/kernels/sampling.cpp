#include "sampling.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

namespace headrace {
namespace {

constexpr double LEAST_WEIGHT = 0x1p-40;  // the reference's
constexpr float LIKELY[] = {0x1p-8f, 0x1p-16f, 0x1p-24f};
constexpr int RUN = 64;                   // values looked at together, most often to be passed over

// Calls visit(i) for each value that is at least (or above) a bound, in order. Values that pass are
// few: whole runs are tried at once, in a loop that the compiler turns into vectors. The bound may
// rise as it goes.
template <bool Above, typename Visit>
void visit_large(const float* x, int n, const float& bound, Visit visit) {
  const auto passes = [&bound](float v) { return Above ? v > bound : v >= bound; };
  int i = 0;
  for (; i + RUN <= n; i += RUN) {
    int any = 0;
    const float fixed = bound;
    for (int j = 0; j < RUN; ++j) any |= Above ? x[i + j] > fixed : x[i + j] >= fixed;
    if (any)
      for (int j = i; j < i + RUN; ++j)
        if (passes(x[j])) visit(j);
  }
  for (; i < n; ++i)
    if (passes(x[i])) visit(i);
}

// Without branches: about as many stay as go.
template <typename Keep>
void keep_if(std::vector<Candidate>& candidates, Keep keep) {
  size_t kept = 0;
  for (const Candidate c : candidates) {
    candidates[kept] = c;
    kept += keep(c);
  }
  candidates.resize(kept);
}

// Of values of at least a bound.
double total_of(const float* x, int n, float bound) {
  double lanes[LANES] = {};
  int i = 0;
  for (; i + LANES <= n; i += LANES)
    for (int j = 0; j < LANES; ++j)
      lanes[j] += static_cast<double>(x[i + j] >= bound ? x[i + j] : 0.0f);
  for (; i < n; ++i) lanes[0] += static_cast<double>(x[i] >= bound ? x[i] : 0.0f);
  return std::accumulate(lanes, lanes + LANES, 0.0);
}

// The first value, of those that are at least a bound, at which their running sum is above a
// threshold; the last of them if rounding kept it below.
int cross_by_id(const float* x, int n, float bound, double threshold) {
  double sum = 0;
  int last = 0;
  for (int i = 0; i < n; i += RUN) {
    const int end = std::min(i + RUN, n);
    const double run = total_of(x + i, end - i, bound);
    if (sum + run > threshold) {
      for (int j = i; j < end; ++j) {
        if (x[j] < bound) continue;
        sum += static_cast<double>(x[j]);
        last = j;
        if (sum > threshold) return j;
      }
    } else {
      sum += run;
      if (run > 0)
        for (int j = i; j < end; ++j) last = x[j] >= bound ? j : last;
    }
  }
  return last;
}

bool is_set(std::span<const uint8_t> mask, int id) {
  const size_t at = static_cast<size_t>(id) / 8;
  return at < mask.size() && (mask[at] >> (id % 8) & 1);
}

float highest_of(const float* x, int n) {
  float lanes[LANES];
  std::fill_n(lanes, LANES, -INFINITY);
  int i = 0;
  for (; i + LANES <= n; i += LANES)
    for (int j = 0; j < LANES; ++j) lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
  for (; i < n; ++i) lanes[0] = std::max(lanes[0], x[i]);
  return *std::max_element(lanes, lanes + LANES);
}

}  // namespace

Sampler::Sampler(const Kernels& kernels, int vocabulary)
    : kernels_(kernels), vocabulary_(vocabulary) {}

bool Sampler::read(const float* logits) {
  logits_ = logits;
  kernels_.log_sum_exp(logits, vocabulary_, &highest_, &log_sum_);
  // NaN or infinity among the logits: there is no distribution, and nothing to sort by.
  return std::isfinite(log_sum_) && std::isfinite(highest_);
}

float Sampler::logprob(int token) const {
  return static_cast<float>(static_cast<double>(logits_[token] - highest_) - log_sum_);
}

int32_t Sampler::draw(const DrawParams& params) {
  const float* logits = logits_;
  float highest = highest_;
  if (params.adjustment) {
    adjust(*params.adjustment);
    logits = adjusted_.data();
    highest = highest_of(logits, vocabulary_);
    if (highest == -INFINITY) return NOTHING_LEFT;
    if (!std::isfinite(highest)) return OUT_OF_RANGE;
  }
  if (params.temperature == 0)
    return static_cast<int32_t>(std::find(logits, logits + vocabulary_, highest) - logits);
  return choose(logits, highest, params);
}

void Sampler::top(int n, int32_t* tokens, float* logprobs) {
  if (n == 0) return;
  candidates_.clear();
  float bound = -INFINITY;
  int i = 0;
  for (; i < n; ++i) candidates_.push_back({logits_[i], 0, i});
  // A heap with the least likely on top: a later id must be above it, not equal, to displace it.
  std::make_heap(candidates_.begin(), candidates_.end(), likelier);
  bound = candidates_.front().logit;
  visit_large<true>(logits_ + n, vocabulary_ - n, bound, [&](int at) {
    std::pop_heap(candidates_.begin(), candidates_.end(), likelier);
    candidates_.back() = {logits_[n + at], 0, n + at};
    std::push_heap(candidates_.begin(), candidates_.end(), likelier);
    bound = candidates_.front().logit;
  });
  std::sort_heap(candidates_.begin(), candidates_.end(), likelier);
  for (i = 0; i < n; ++i) {
    tokens[i] = candidates_[i].id;
    logprobs[i] = logprob(candidates_[i].id);
  }
}

// In float, one operation after the other, as in the reference: the results have the same bits.
void Sampler::adjust(const Adjustment& a) {
  adjusted_.resize(vocabulary_);
  if (a.limited) {
    std::fill(adjusted_.begin(), adjusted_.end(), -INFINITY);
    for (const int id : a.allowed)
      if (!a.masked || is_set(a.mask, id)) adjusted_[id] = logits_[id];
  } else if (a.masked) {
    keep_masked(a.mask);
  } else {
    std::memcpy(adjusted_.data(), logits_, sizeof(float) * vocabulary_);
  }
  for (size_t i = 0; i < a.bias.ids.size(); ++i) adjusted_[a.bias.ids[i]] += a.bias.values[i];
  for (const int id : a.banned) adjusted_[id] = -INFINITY;
  if (!a.seen.empty()) {
    if (penalized_.empty()) penalized_.resize(vocabulary_);
    if (++row_number_ == 0) {  // wrapped around
      std::fill(penalized_.begin(), penalized_.end(), 0);
      row_number_ = 1;
    }
    for (const int id : a.seen) {
      if (penalized_[id] == row_number_) continue;
      penalized_[id] = row_number_;
      float& x = adjusted_[id];
      x = x > 0 ? x / a.repetition : x * a.repetition;
    }
  }
  for (size_t i = 0; i < a.counts.ids.size(); ++i) {
    if (!(a.counts.values[i] > 0)) continue;
    float& x = adjusted_[a.counts.ids[i]];
    const float often = a.frequency * a.counts.values[i];
    x = x - often;
    x = x - a.presence;
  }
}

// A grammar allows a handful of tokens or nearly all: most words of the mask are all zeros or ones.
void Sampler::keep_masked(std::span<const uint8_t> mask) {
  constexpr int WORD = 64;
  float* out = adjusted_.data();
  std::fill(adjusted_.begin(), adjusted_.end(), -INFINITY);
  const int end = static_cast<int>(std::min<size_t>(vocabulary_, mask.size() * 8));
  int first = 0;
  for (; first + WORD <= end; first += WORD) {
    uint64_t word;
    std::memcpy(&word, mask.data() + first / 8, sizeof word);
    if constexpr (std::endian::native == std::endian::big) word = __builtin_bswap64(word);
    if (word == ~uint64_t{0}) {
      std::memcpy(out + first, logits_ + first, WORD * sizeof(float));
      continue;
    }
    for (; word; word &= word - 1) {
      const int id = first + std::countr_zero(word);
      out[id] = logits_[id];
    }
  }
  for (int id = first; id < end; ++id)
    if (is_set(mask, id)) out[id] = logits_[id];
}

int Sampler::choose(const float* logits, float highest, const DrawParams& params) {
  weights_.resize(vocabulary_);
  // The inverse of a tiny temperature must stay finite: 0 * infinity is NaN.
  const float sharpness = static_cast<float>(std::min(1.0 / params.temperature, 1e30));
  kernels_.exponentials(logits, highest, sharpness, vocabulary_, weights_.data());
  const float least = static_cast<float>(std::clamp(params.min_p, LEAST_WEIGHT, 1.0));
  if (params.top_k <= 0 && params.typical_p >= 1 && params.top_p >= 1) {
    const double sum = total_of(weights_.data(), vocabulary_, least);
    return cross_by_id(weights_.data(), vocabulary_, least, params.uniform * sum);
  }
  double sum = collect_enough(logits, least, params);
  if (params.top_k > 0) keep_top(params.top_k);
  if (params.typical_p < 1) keep_typical(params.typical_p);
  if (params.top_k > 0 || params.typical_p < 1) sum = total();
  if (params.top_p < 1) {
    const Crossing end =
        ranking_.cross(candidates_, ByLogit{}, Sum::Weight, params.top_p * sum);
    keep_if(candidates_, [&](const Candidate& c) { return !likelier(end.at, c); });
    sum = total();
  }
  double running = 0;
  for (const Candidate& c : candidates_) {  // which are in order of id
    running += c.weight;
    if (running > params.uniform * sum) return c.id;
  }
  return candidates_.back().id;
}

// Most distributions have most of their mass in few tokens. The tokens above some weight are a prefix
// of the order; if top_k or top_p are sure to end among them, the others are only summed. Returns the
// sum of all weights of at least `least`, if no filter but top_p follows; otherwise nothing.
double Sampler::collect_enough(const float* logits, float least, const DrawParams& params) {
  const bool by_count = params.top_k > 0, needs_all = !by_count && params.typical_p < 1;
  const double sum = by_count || needs_all ? 0 : total_of(weights_.data(), vocabulary_, least);
  const double needed = params.top_p * sum;
  for (const float weight : LIKELY) {
    if (needs_all || weight <= least) break;
    collect(logits, weight);
    if (by_count ? candidates_.size() >= static_cast<size_t>(params.top_k) : total() > needed)
      return sum;
  }
  collect(logits, least);
  return sum;
}

void Sampler::collect(const float* logits, float least) {
  candidates_.clear();
  candidates_.reserve(vocabulary_);
  visit_large<false>(weights_.data(), vocabulary_, least, [&](int id) {
    candidates_.push_back({logits[id], weights_[id], id});
  });
}

void Sampler::keep_top(int k) {
  if (static_cast<size_t>(k) >= candidates_.size()) return;
  const Candidate last =
      ranking_.cross(candidates_, ByLogit{}, Sum::Count, k).at;
  keep_if(candidates_, [&](const Candidate& c) { return !likelier(last, c); });
}

void Sampler::keep_typical(double mass) {
  const double sum = total();
  const double first = candidates_[0].logit;  // any one near: differences are small, sums exact
  double mean = 0;
  for (const Candidate& c : candidates_) mean += c.weight * (c.logit - first);
  const ByDistance key{first + mean / sum};
  const Candidate last =
      ranking_.cross(candidates_, key, Sum::Weight, mass * sum).at;
  keep_if(candidates_, [&](const Candidate& c) { return !precedes(key, last, c); });
}

double Sampler::total() const {
  double sum = 0;
  for (const Candidate& c : candidates_) sum += c.weight;
  return sum;
}

}  // namespace headrace
