// A product of rows with a packed weight, shared out among the threads of a job.
//
// Knows tiles, streams and threads; not what the rows are.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
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

  bool quantized() const;        // some of it
  bool quantized_wholly() const;
  std::string describe() const;  // its shape and the kinds of its matrices
};

// The rows that a product multiplies, and where its outputs go.
struct ProductRows {
  int rows;
  const float* x;  // [rows][inputs]
  size_t x_stride;
  // Instead of x, for a weight that is quantized all through: writes one row, when it is needed.
  std::function<void(int row, float* to)> make;
  float* out;  // [rows][outputs]
  size_t out_stride;
  const float* added;  // [rows][outputs], out_stride apart: what the product is added to; or null
};

// Shares a run of units among neighbouring threads, one from each end: whoever is faster takes more.
// Two threads share a counter, and nobody else looks at it. Every thread of a job begins the same
// shares in the same order, with a barrier between one and the next.
class Shares {
 public:
  explicit Shares(int threads) : threads_(threads), counters_((threads + 1) / 2), turns_(threads) {}

  void begin(int thread);
  // Calls take(unit) for units of [0, units) until its pair's part of them is used up.
  template <typename Take>
  void each(int thread, int units, Take take) {
    const int pair = thread / 2, first = 2 * pair, last = std::min(first + 2, threads_);
    const int from = units_before(units, first), to = units_before(units, last);
    std::atomic<int>& taken = counters_[pair].taken[turns_[thread].number % 2];
    for (int mine = 0; taken.fetch_add(1, std::memory_order_relaxed) < to - from; ++mine)
      take(thread % 2 == 0 ? from + mine : to - 1 - mine);
  }

 private:
  int units_before(int units, int thread) const {
    return static_cast<int>(static_cast<int64_t>(units) * thread / threads_);
  }
  struct alignas(64) Counter {
    std::atomic<int> taken[2] = {0, 0};
  };
  struct alignas(64) Turn {
    uint32_t number = 0;
  };
  int threads_;
  std::vector<Counter> counters_;  // one a pair; shares use the two in turn
  std::vector<Turn> turns_;        // one a thread
};

// Memory that products need: one shared area, and one for each thread.
class ProductScratch {
 public:
  ProductScratch(int threads, int max_inputs);
  uint8_t* shared() const { return shared_.data(); }
  uint8_t* own(int thread) const { return own_.data() + thread * own_bytes_; }
  // A tile of made rows, before they are quantized.
  float* made(int thread) const {
    return reinterpret_cast<float*>(own(thread) + quantized_bytes_);
  }
  // A panel's 4-bit codes at a byte each.
  uint8_t* unpacked(int thread) const { return own(thread) + unpacked_at_; }
  Shares& shares() const { return shares_; }
  size_t bytes() const { return shared_.bytes() + own_.bytes(); }

 private:
  size_t quantized_bytes_, unpacked_at_, own_bytes_;
  Buffer shared_, own_;
  mutable Shares shares_;
};

// rows.out = rows.x * weight + bias [+ rows.added]. Called by every thread of a job; the caller places
// a barrier after it.
void multiply(const Kernels& kernels, Pool& pool, int thread, const ProductScratch& scratch,
              const Linear& weight, const ProductRows& rows);

}  // namespace headrace
