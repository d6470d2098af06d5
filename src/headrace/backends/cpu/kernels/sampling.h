// Drawing a token from a row of logits. The order of operations is that of the reference backend
// (backends/reference/sampling.py): the same logits and the same uniform give the same token.
#pragma once

#include <vector>

#include "kernels.h"

namespace headrace {

struct DrawParams {
  float temperature;
  float top_p;
  float min_p;
  int top_k;
  double uniform;
};

constexpr int NO_TOKEN = -1;

struct Drawn {
  int token;      // NO_TOKEN where the logits are not numbers
  float logprob;  // under the untempered distribution
};

class Sampler {
 public:
  Sampler(const Kernels& kernels, int vocabulary);
  Drawn draw(const float* logits, const DrawParams& params);
  float score(const float* logits, int token) const;

 private:
  int choose(const float* logits, float highest, const DrawParams& params);

  const Kernels& kernels_;
  int vocabulary_;
  std::vector<float> weights_;  // exp((logit - highest) / temperature), by id
  std::vector<int> ids_;
};

}  // namespace headrace
