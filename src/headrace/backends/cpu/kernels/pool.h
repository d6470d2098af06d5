// Threads that do one piece of work together, one after the other, hundreds a step.
//
// The thread that calls run() leads: it hands out shares to the helpers that are awake at that
// moment, does one itself, and waits for the others. Handing out and waiting spin, as a wake-up would
// cost more than most pieces of work take; whoever waits for long sleeps, so that others can run. A
// helper that sleeps, or that lost its core too often (attendance.h), gets no share: nobody waits for
// it. How many work together changes nothing but the time. Knows nothing of models.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "attendance.h"

namespace headrace {

// What a thread is to do of a piece of work.
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

  // Calls work(share) on at most `most` threads at once, on the caller as rank 0; returns when all
  // have done theirs. One caller at a time.
  template <typename Work>
  void run(int most, const Work& work) {
    run_job(most, [](const void* w, const Share& share) { (*static_cast<const Work*>(w))(share); },
            &work);
  }

  // Said by the caller of run() when it has done some more, also from within its own share.
  void advance() { progress_.fetch_add(1, std::memory_order_relaxed); }
  // Any thread may read it while work is done: as long as it moves, something is being done.
  uint64_t progress() const { return progress_.load(std::memory_order_relaxed); }

  // The threads that worked together, over all that could have been shared: as many as there are on
  // a machine that does nothing else. Counted since the last time.
  double take_mean_members();

  // Whether shares are timed, and what they took, of all threads, since the last time.
  void time_shares(bool on) { timed_ = on; }
  double take_worked_s();

 private:
  using Job = void (*)(const void* work, const Share& share);

  struct Helper {
    // Written by the leader: which turn it is, and this helper's rank in it.
    alignas(64) std::atomic<uint32_t> ticket{0};
    // Written by the helper: the last ticket that is done with, and whether it looks at its ticket.
    alignas(64) std::atomic<uint32_t> done{0};
    std::atomic<bool> awake{false};
    double worked_s = 0;
    // The leader's own.
    alignas(64) int rank = 0;  // 0: has no share
    uint32_t woken = 0;        // the turn in which it was last called
    Attendance attendance;
    std::thread thread;
  };

  void run_job(int most, Job job, const void* work);
  int gather(int most);
  void look_for_returns();
  void call(Helper& helper);
  void await(Helper& helper, uint32_t ticket, int members);
  void help(Helper& helper, int thread);
  void do_share(Job job, const void* work, const Share& share, double& worked_s) const;

  const int threads_;
  std::vector<std::unique_ptr<Helper>> helpers_;
  uint32_t turn_ = 0;
  int out_ = 0;  // helpers that are left out
  double worked_s_ = 0;
  uint64_t shared_turns_ = 0, shared_members_ = 0;  // in which all could have had a share; who had one
  bool timed_ = false;
  alignas(64) Job job_ = nullptr;  // read by helpers after they have seen a ticket
  const void* work_ = nullptr;
  int members_ = 1;
  alignas(64) std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<uint64_t> progress_{0};
};

}  // namespace headrace
