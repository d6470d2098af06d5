#include "ranked.h"

#include <algorithm>

namespace headrace {
namespace {

constexpr size_t FEW = 64;  // sorted outright
constexpr int BINS = 1024;  // (high - low) * scale may round up to BINS - 1, never past it

double share(const Candidate& c, Sum what) {
  return what == Sum::Count ? 1.0 : static_cast<double>(c.weight);
}

Crossing walk(std::span<const Candidate> ordered, Sum what, double threshold, double sum) {
  for (const Candidate& c : ordered) {
    sum += share(c, what);
    if (sum >= threshold) return {c, sum};
  }
  return {ordered.back(), sum};
}

}  // namespace

// Each round keeps the one bin in which the sum crosses. A bin's keys all lie before the next bin's:
// subtracting, scaling and truncating are monotone, rounded or not.
template <typename Key>
Crossing Ranking::cross(std::span<const Candidate> from, Key key, Sum what, double threshold) {
  if (narrowed_.size() < from.size()) narrowed_.resize(from.size());
  if (bins_.size() < from.size()) bins_.resize(from.size());
  double before = 0;
  for (;;) {
    double low = key(from[0]), high = low;
    for (const Candidate& c : from) {
      const double k = key(c);
      low = k < low ? k : low;
      high = k > high ? k : high;
    }
    if (from.size() <= FEW || low == high) break;

    const double scale = (BINS - 1) / (high - low);
    sums_.assign(BINS, 0.0);
    for (size_t i = 0; i < from.size(); ++i) {
      const int bin = static_cast<int>((key(from[i]) - low) * scale);
      bins_[i] = static_cast<uint16_t>(bin);
      sums_[bin] += share(from[i], what);
    }
    int bin = 0, last = BINS - 1;
    while (sums_[last] == 0) --last;
    while (bin < last && before + sums_[bin] < threshold) before += sums_[bin++];

    size_t kept = 0;
    for (size_t i = 0; i < from.size(); ++i) {  // may go over itself: kept <= i
      narrowed_[kept] = from[i];
      kept += bins_[i] == bin;
    }
    from = {narrowed_.data(), kept};
  }
  if (from.data() != narrowed_.data()) std::copy(from.begin(), from.end(), narrowed_.begin());
  const std::span<Candidate> rest{narrowed_.data(), from.size()};
  const auto order = [key](const Candidate& a, const Candidate& b) { return precedes(key, a, b); };
  // All alike are in order of id already, and may be a whole vocabulary.
  if (!std::is_sorted(rest.begin(), rest.end(), order)) std::sort(rest.begin(), rest.end(), order);
  return walk(rest, what, threshold, before);
}

template Crossing Ranking::cross(std::span<const Candidate>, ByLogit, Sum, double);
template Crossing Ranking::cross(std::span<const Candidate>, ByDistance, Sum, double);

}  // namespace headrace
