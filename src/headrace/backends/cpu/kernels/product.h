// A product of rows with a packed weight, shared out among the threads of a pool.
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
  // Instead of x, for a weight that is wholly quantized: writes one row when it is needed.
  std::function<void(int row, float* to)> make;
  float* out;  // [rows][outputs]
  size_t out_stride;
  const float* added;  // [rows][outputs], out_stride apart: what the product is added to; or null
};

// Units of work that threads take dynamically: two neighbouring threads share a run of units and take
// from its two ends; a thread whose run is used up takes from the others'. A thread that loses its
// core delays only the unit that it has begun.
class Units {
 public:
  explicit Units(int threads) : runs_((threads + 1) / 2) {}

  // By the leader, before the units are shared out.
  void begin() {
    for (Run& run : runs_) run.taken.store(0, std::memory_order_relaxed);
  }
  // Calls take(unit, direction) for units of [0, units) until there are none: direction is 1 if the
  // unit after it comes next, -1 if the one before it does.
  template <typename Take>
  void each(const Share& share, int units, Take take) {
    if (units <= share.members) {  // one each, or none: nothing to choose from
      if (share.rank < units) take(share.rank, 1);
      return;
    }
    const int runs = (share.members + 1) / 2;
    const bool front = share.rank % 2 == 0;
    for (int i = 0, run = share.rank / 2; i < runs; ++i, run = run + 1 == runs ? 0 : run + 1) {
      const int from = before(units, 2 * run, share.members);
      const int to = before(units, std::min(2 * run + 2, share.members), share.members);
      for (;;) {
        const uint64_t taken =
            runs_[run].taken.fetch_add(front ? 1 : uint64_t{1} << 32, std::memory_order_relaxed);
        const int at_front = static_cast<int>(static_cast<uint32_t>(taken));
        const int at_back = static_cast<int>(taken >> 32);
        if (at_front + at_back >= to - from) break;
        if (front) take(from + at_front, 1);
        else take(to - 1 - at_back, -1);
      }
    }
  }

 private:
  static int before(int units, int rank, int members) {
    return static_cast<int>(static_cast<int64_t>(units) * rank / members);
  }
  struct alignas(64) Run {
    std::atomic<uint64_t> taken{0};  // from the front in the lower half, from the back in the upper
  };
  std::vector<Run> runs_;  // one per pair of threads
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
  Units& units() const { return units_; }
  size_t bytes() const { return shared_.bytes() + own_.bytes(); }

 private:
  size_t quantized_bytes_, unpacked_at_, own_bytes_;
  Buffer shared_, own_;
  mutable Units units_;
};

// rows.out = rows.x * weight + bias [+ rows.added], by all threads of the pool.
void multiply(const Kernels& kernels, Pool& pool, const ProductScratch& scratch,
              const Linear& weight, const ProductRows& rows);

}  // namespace headrace
