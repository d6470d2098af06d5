#include "pool.h"

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace {
namespace {

// Longer than the gap between two steps of a busy engine, in which Python plans the next one: waking
// a thread costs tens of microseconds, and more where its core is a virtual one. Short enough that
// an idle engine does not burn a core.
constexpr std::chrono::microseconds SPIN_BEFORE_PARKING{400};
constexpr int SPINS_BETWEEN_CLOCKS = 64;
// A barrier waits for threads that are running; past this the other was descheduled: let it in.
constexpr int SPINS_BEFORE_YIELDING = 20000;

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Denormal scales and activations make products 20 times slower, and nobody can tell them from 0.
class FlushDenormals {
 public:
#if defined(__x86_64__)
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(saved_ | 1u << 24));
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

}  // namespace

Pool::Pool(int threads) : threads_(threads < 1 ? 1 : threads) {
  for (int t = 1; t < threads_; ++t) workers_.emplace_back([this, t] { work(t); });
}

Pool::~Pool() {
  stopping_.store(true);
  jobs_started_.fetch_add(1, std::memory_order_release);
  jobs_started_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Pool::run(Job job, void* context) {
  FlushDenormals flush;
  job_ = job;
  context_ = context;
  jobs_started_.fetch_add(1, std::memory_order_release);
  jobs_started_.notify_all();
  job(context, 0);
  barrier();  // all have finished: the job and its context may go away
}

void Pool::work(int thread) {
  FlushDenormals flush;
  uint32_t seen = 0;
  for (;;) {
    int spins = 0;
    uint32_t now;
    const auto since = std::chrono::steady_clock::now();
    while ((now = jobs_started_.load(std::memory_order_acquire)) == seen) {
      pause();
      if (++spins % SPINS_BETWEEN_CLOCKS == 0 &&
          std::chrono::steady_clock::now() - since > SPIN_BEFORE_PARKING)
        jobs_started_.wait(seen, std::memory_order_acquire);
    }
    seen = now;
    if (stopping_.load()) return;
    job_(context_, thread);
    barrier();
  }
}

void Pool::barrier() {
  if (threads_ == 1) return;
  const uint32_t before = barriers_passed_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    barriers_passed_.store(before + 1, std::memory_order_release);
    return;
  }
  int spins = 0;
  while (barriers_passed_.load(std::memory_order_acquire) == before) {
    if (++spins < SPINS_BEFORE_YIELDING) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

}  // namespace headrace
