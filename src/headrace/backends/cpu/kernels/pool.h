// A pool of threads that run one job together, with barriers inside it.
//
// A step is one job: every thread walks the same instructions and meets at barriers that spin, so
// a hundred small operations cost a hundred barriers of well under a microsecond, not a hundred
// wake-ups. Between jobs the workers spin for a moment, then park. Knows nothing of models.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace headrace {

class Pool {
 public:
  using Job = void (*)(void* context, int thread);

  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }

  // Runs job(context, t) for t in [0, threads), t = 0 on the caller. One job at a time.
  void run(Job job, void* context);

  // Only inside a job, by every thread.
  void barrier();

  // Said by whoever does some more of a job's work; only the first thread's word counts.
  void advance(int thread) {
    if (thread == 0) progress_.fetch_add(1, std::memory_order_relaxed);
  }
  // Any thread may read it while a job runs: as long as it moves, work is being done.
  uint64_t progress() const { return progress_.load(std::memory_order_relaxed); }

 private:
  void work(int thread);

  const int threads_;
  std::vector<std::thread> workers_;
  Job job_ = nullptr;
  void* context_ = nullptr;
  // Each on its own cache line: they are written by different threads.
  alignas(64) std::atomic<uint32_t> jobs_started_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> barriers_passed_{0};
  alignas(64) std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<uint64_t> progress_{0};
};

}  // namespace headrace
