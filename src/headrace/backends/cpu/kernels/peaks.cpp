#include "peaks.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <numeric>
#include <vector>

#include "buffer.h"

namespace headrace {
namespace {

constexpr int TRIES = 24;
constexpr int ROUNDS = 100000;  // well under a millisecond, where there is VNNI

// The sum of the threads' best rates: work(thread) gives what it did. Each times itself, so that one
// which had to wait for a core does not spoil the others' tries.
double best_rate(Pool& pool, const std::function<double(int thread)>& work) {
  std::vector<double> best(pool.threads());
  for (int i = 0; i < TRIES; ++i)
    pool.run(pool.threads(), [&](const Share& share) {
      const auto began = std::chrono::steady_clock::now();
      const double done = work(share.thread);
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
      best[share.thread] = std::max(best[share.thread], done / took.count());
    });
  return std::accumulate(best.begin(), best.end(), 0.0);
}

}  // namespace

Peaks measure_peaks(const Kernels& kernels, Pool& pool, size_t read_bytes) {
  const size_t part = read_bytes / pool.threads() / 256 * 256;
  Buffer data(part * pool.threads() + 4096, true);
  std::fill_n(data.data(), data.bytes(), 1);
  return {
      best_rate(pool, [&](int) { return static_cast<double>(kernels.dot_loop(ROUNDS)); }),
      best_rate(pool, [&](int) { return static_cast<double>(kernels.float_loop(ROUNDS)); }),
      best_rate(pool,
                [&](int thread) {
                  kernels.read_loop(data.data() + thread * part, part);
                  return static_cast<double>(part);
                }),
  };
}

}  // namespace headrace
