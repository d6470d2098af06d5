// Threads that compute one operation together, then the next: hundreds per step.
//
// The thread that calls run() is the leader: it gives shares to the helpers that are awake at that
// moment, does one itself, and waits for the others. Both sides spin, as a wake-up would take longer
// than most operations; a thread that waits for long sleeps, so that others can run. A helper that
// sleeps, or that lost its core too often (attendance.h), gets no share, and is not waited for. The
// number of threads changes only the time, never a result. Knows nothing of models.
#pragma once

#include <time.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "attendance.h"

namespace headrace {

// A thread's share of an operation.
struct Share {
  int thread;   // its number in the pool: for memory of its own
  int rank;     // its number among those that work on this
  int members;  // how many those are
};

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }

  // Calls work(share) on all threads that are awake, on the caller as rank 0; returns when all are done.
  // Uses only the caller if there is not more than one unit of work. One caller at a time.
  template <typename Work>
  void run(int units, const Work& work) {
    if (units <= 1 || threads_ == 1) return run_alone(work);
    run_job([](const void* w, const Share& share) { (*static_cast<const Work*>(w))(share); }, &work);
  }

  // Called by the caller of run() when it has made progress, also from within its own share.
  void advance() { progress_.fetch_add(1, std::memory_order_relaxed); }
  // Any thread may read it while work is done: as long as it moves, something is being done.
  uint64_t progress() const { return progress_.load(std::memory_order_relaxed); }

  // The threads that worked together, of all work that was shared out: as many as there are on a
  // machine that does nothing else. Counted since the last time.
  double take_mean_members();

  // Whether shares are timed, and what they took, of all threads, since the last time.
  void time_shares(bool on) { timed_ = on; }
  double take_worked_s();

 private:
  using Job = void (*)(const void* work, const Share& share);

  // What helpers poll, on its own cache line. `version` is odd once ranks have changed; the rest is
  // read by helpers with a rank, and does not change until they are done.
  struct alignas(64) Notice {
    std::atomic<uint32_t> version{0};
    int members = 1;
    Job job = nullptr;
    const void* work = nullptr;
  };
  struct Helper {
    alignas(64) std::atomic<uint32_t> done{0};  // the last notice that it did its share of
    double worked_s = 0;
    // Written by the leader, seldom.
    alignas(64) std::atomic<int> rank{0};  // 0: it has no share
    std::atomic<uint32_t> calls{0};        // changes when it is to wake up
    uint32_t called_at = 0;                // the turn of the last call
    bool out = false;                      // left out for now (attendance.h)
    Attendance attendance;
    alignas(64) std::atomic<bool> awake{false};  // written by the helper, seldom
#if defined(__linux__)
    clockid_t cpu_clock = 0;  // its own; written before it is first awake
#endif
    std::thread thread;
  };

  template <typename Work>
  void run_alone(const Work& work) {
    if (!timed_) return work(Share{0, 0, 1});
    do_share([](const void* w, const Share& share) { (*static_cast<const Work*>(w))(share); }, &work,
             Share{0, 0, 1}, worked_s_);
  }
  void run_job(Job job, const void* work);
  void gather();
  void set_ranks();
  void look_for_returns();
  void await(Helper& helper);
  void help(Helper& helper, int thread);
  uint32_t await_notice(Helper& helper, uint32_t seen);
  void do_share(Job job, const void* work, const Share& share, double& worked_s) const;
  static void wake(Helper& helper);
  static double cpu_seconds(const Helper& helper);

  const int threads_;
  std::vector<std::unique_ptr<Helper>> helpers_;
  Notice notice_;
  alignas(64) std::atomic<uint32_t> changes_{0};  // of anyone's `awake`
  alignas(64) std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<uint64_t> progress_{0};
  // The leader's own.
  uint32_t turn_ = 0, seen_changes_ = 0;
  int missing_ = 0;  // helpers without a rank
  bool any_out_ = false, timed_ = false;
  double worked_s_ = 0;
  uint64_t shared_turns_ = 0, shared_members_ = 0;
};

}  // namespace headrace
