// Finds where the running sum of candidates, in order of a key, crosses a threshold: by histograms of
// the key instead of sorting. Linear in the number of candidates.
//
// Knows keys, ties and sums; sampling.cpp knows what they mean (top_k, nucleus, typical set).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace headrace {

struct Candidate {
  float logit;
  float weight;
  int id;
};

// Likeliest first, of equals the lower id.
inline bool likelier(const Candidate& a, const Candidate& b) {
  return (a.logit > b.logit) | ((a.logit == b.logit) & (a.id < b.id));  // without branches
}

struct ByLogit {
  double operator()(const Candidate& c) const { return -static_cast<double>(c.logit); }
};
struct ByDistance {
  double mean;
  double operator()(const Candidate& c) const {
    const double d = static_cast<double>(c.logit) - mean;
    return d < 0 ? -d : d;
  }
};

// Smaller keys first; of equals the likelier.
template <typename Key>
bool precedes(Key key, const Candidate& a, const Candidate& b) {
  const double ka = key(a), kb = key(b);
  return (ka < kb) | ((ka == kb) & likelier(a, b));
}

enum class Sum { Count, Weight };  // what is summed

struct Crossing {
  Candidate at;  // the first at which the sum is at least that; the last of all if rounding kept it below
  double sum;    // including it
};

class Ranking {
 public:
  // `candidates` in ascending order of id, not empty.
  template <typename Key>
  Crossing cross(std::span<const Candidate> candidates, Key key, Sum what, double threshold);

 private:
  std::vector<Candidate> narrowed_;  // grows, never shrinks: not zeroed again for each row
  std::vector<uint16_t> bins_;
  std::vector<double> sums_;
};

}  // namespace headrace
