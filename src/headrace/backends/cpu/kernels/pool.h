// Threads that do one piece of work together, then the next: hundreds a step.
//
// The thread that calls run() leads: it hands out shares to the helpers that are awake at that
// moment, does one itself, and waits for the others. Handing out and waiting spin, as a wake-up would
// cost more than most pieces of work take; whoever waits for long sleeps, so that others can run. A
// helper that sleeps, or that lost its core too often (attendance.h), gets no share: nobody waits for
// it. How many work together changes nothing but the time. Knows nothing of models.
#pragma once

#include <array>
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

// A set of helpers, by number.
class HelperSet {
 public:
  static constexpr int WORDS = 4, MOST = 64 * WORDS;

  bool operator==(const HelperSet&) const = default;
  bool has(int i) const { return words[i / 64] >> (i % 64) & 1; }
  void add(int i) { words[i / 64] |= uint64_t{1} << (i % 64); }
  void remove(int i) { words[i / 64] &= ~(uint64_t{1} << (i % 64)); }
  int count() const;
  int count_below(int i) const;
  void keep_first(int most);

  std::array<uint64_t, WORDS> words{};
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

  // The threads that worked together, of all work that every thread could have had a share of: as
  // many as there are on a machine that does nothing else. Counted since the last time.
  double take_mean_members();

  // Whether shares are timed, and what they took, of all threads, since the last time.
  void time_shares(bool on) { timed_ = on; }
  double take_worked_s();

 private:
  using Job = void (*)(const void* work, const Share& share);

  // What helpers look at, all on one line. `version` is odd while the leader writes the rest; work and
  // job are read by those who are called, and stay until they are done.
  struct alignas(64) Notice {
    std::atomic<uint32_t> version{0};
    int members = 1;
    Job job = nullptr;
    const void* work = nullptr;
    std::array<std::atomic<uint64_t>, HelperSet::WORDS> called{};
  };
  struct Helper {
    alignas(64) std::atomic<uint32_t> done{0};  // the last notice that it did its share of
    double worked_s = 0;
    alignas(64) std::atomic<uint32_t> calls{0};  // changes when it is to wake up
    uint32_t called_at = 0;                      // the turn of the last call; the leader's own
    Attendance attendance;                       // likewise
    std::thread thread;
  };

  void run_job(int most, Job job, const void* work);
  HelperSet gather(int most);
  void look_for_returns();
  void wake(Helper& helper);
  void publish(const HelperSet& called, int members, Job job, const void* work);
  void await(int i, int members);
  void help(Helper& helper, int i);
  uint32_t await_notice(Helper& helper, int i, uint32_t seen);
  void set_awake(int i, bool awake);
  void do_share(Job job, const void* work, const Share& share, double& worked_s) const;

  const int threads_;
  std::vector<std::unique_ptr<Helper>> helpers_;
  Notice notice_;
  alignas(64) std::array<std::atomic<uint64_t>, HelperSet::WORDS> awake_{};  // written by helpers
  alignas(64) std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<uint64_t> progress_{0};
  // The leader's own.
  HelperSet last_called_, out_;
  bool any_out_ = false, timed_ = false;
  uint32_t turn_ = 0;
  double worked_s_ = 0;
  uint64_t shared_turns_ = 0, shared_members_ = 0;
};

}  // namespace headrace
