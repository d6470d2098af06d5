// A product of rows with a packed weight, shared out among the threads of a job.
//
// Knows tiles, streams and threads; not what the rows are.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace headrace {

// A weight of one or more packed matrices side by side in the output.
struct Linear {
  struct Part {
    const Packed* matrix;
    int offset;  // of its first output
  };
  std::vector<Part> parts;
  std::vector<float> bias;  // [outputs], or empty
  int inputs = 0;
  int outputs = 0;

  bool quantized() const;
  std::string describe() const;  // its shape and the kinds of its matrices
};

// Memory that products need: one shared area, and one for each thread.
class ProductScratch {
 public:
  ProductScratch(int threads, int max_inputs);
  uint8_t* shared() const { return shared_.data(); }
  uint8_t* own(int thread) const { return own_.data() + thread * own_bytes_; }
  size_t bytes() const { return shared_.bytes() + own_.bytes(); }

 private:
  size_t own_bytes_;
  Buffer shared_, own_;
};

// out [rows][outputs] = x [rows][inputs] * weight + bias. Called by every thread of a job; the
// caller places a barrier after it.
void multiply(const Kernels& kernels, Pool& pool, int thread, const ProductScratch& scratch,
              const Linear& weight, const float* x, size_t x_stride, int rows, float* out,
              size_t out_stride);

}  // namespace headrace
