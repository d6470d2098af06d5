#include "pool.h"

#include <algorithm>
#include <chrono>

#include "denormals.h"

#if defined(__linux__)
#include <pthread.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace {
namespace {

using Clock = std::chrono::steady_clock;

// Longer than the gap between two steps of a busy engine, in which Python plans the next one: waking
// a thread costs tens of microseconds, and more where its core is a virtual one. Short enough that
// an idle engine does not burn a core.
constexpr std::chrono::microseconds SPIN_FOR_WORK{400};
// How long the leader polls a helper that is not done, before it asks whether that helper is running
// at all. If not, the helper has lost its core, and may be waiting for ours.
constexpr std::chrono::microseconds SPIN_FOR_OTHERS{100};
// The part of that time in which a helper must not have run to count as gone.
constexpr double AWAY_S = 50e-6;
// How long the leader then sleeps between two polls: short compared with a time slice.
constexpr std::chrono::microseconds NAP{100};
constexpr int SPINS_BETWEEN_CLOCKS = 64;
// A helper is woken again after this many turns, in case it fell asleep unnoticed.
constexpr uint32_t TURNS_BETWEEN_CALLS = 64;
// How often (in turns) helpers are checked for coming back: rarely, as reading a clock takes time.
constexpr uint32_t TURNS_BETWEEN_LOOKS = 32;

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

double seconds(Clock::time_point at) {
  return std::chrono::duration<double>(at.time_since_epoch()).count();
}

// Polls `is_there()` until it is true or the time is over; returns whether it became true.
template <typename IsThere>
bool spin(Clock::duration longest, IsThere is_there) {
  for (int i = 0; i < SPINS_BETWEEN_CLOCKS; ++i) {
    if (is_there()) return true;
    pause();
  }
  const Clock::time_point until = Clock::now() + longest;
  do {
    for (int i = 0; i < SPINS_BETWEEN_CLOCKS; ++i) {
      if (is_there()) return true;
      pause();
    }
  } while (Clock::now() < until);
  return false;
}

}  // namespace

Pool::Pool(int threads) : threads_(std::max(1, threads)), missing_(threads_ - 1) {
  for (int i = 0; i < threads_ - 1; ++i) {
    helpers_.push_back(std::make_unique<Helper>());
    helpers_[i]->called_at = turn_ - TURNS_BETWEEN_CALLS;
  }
  for (int i = 0; i < threads_ - 1; ++i)
    helpers_[i]->thread = std::thread([this, i] { help(*helpers_[i], i + 1); });
}

Pool::~Pool() {
  stopping_.store(true);
  for (auto& helper : helpers_) wake(*helper);
  for (auto& helper : helpers_) helper->thread.join();
}

void Pool::run_job(Job job, const void* work) {
  gather();
  const int members = threads_ - missing_;
  ++shared_turns_;
  shared_members_ += members;
  if (members > 1) {
    notice_.members = members;
    notice_.job = job;
    notice_.work = work;
    const uint32_t version = notice_.version.load(std::memory_order_relaxed);
    notice_.version.store((version + 2) & ~1u, std::memory_order_release);  // the next even one
  }
  do_share(job, work, Share{0, 0, members}, worked_s_);
  if (members > 1)
    for (auto& helper : helpers_)
      if (helper->rank.load(std::memory_order_relaxed)) await(*helper);
}

// Gives ranks to the helpers that are awake, and wakes the others.
void Pool::gather() {
  ++turn_;
  if (any_out_ && turn_ % TURNS_BETWEEN_LOOKS == 0) look_for_returns();
  const uint32_t changes = changes_.load(std::memory_order_acquire);
  if (changes != seen_changes_) {
    seen_changes_ = changes;
    set_ranks();
  }
  if (missing_ == 0) return;
  for (auto& helper : helpers_) {
    if (helper->out || helper->awake.load(std::memory_order_relaxed)) continue;
    if (turn_ - helper->called_at < TURNS_BETWEEN_CALLS) continue;
    helper->called_at = turn_;
    wake(*helper);
  }
}

void Pool::set_ranks() {
  // Odd until the next notice: a helper must not take its new rank for one of the last notice.
  notice_.version.store(notice_.version.load(std::memory_order_relaxed) | 1,
                        std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  int members = 1;
  for (auto& helper : helpers_) {
    const bool is_there = !helper->out && helper->awake.load(std::memory_order_relaxed);
    helper->rank.store(is_there ? members++ : 0, std::memory_order_relaxed);
    if (is_there) helper->called_at = turn_ - TURNS_BETWEEN_CALLS;  // should it fall asleep
  }
  missing_ = threads_ - members;
}

void Pool::look_for_returns() {
  const double now = seconds(Clock::now());
  any_out_ = false;
  for (auto& helper : helpers_) {
    if (helper->out && helper->attendance.returns(now, threads_)) {
      helper->out = false;
      helper->called_at = turn_ - TURNS_BETWEEN_CALLS;
      --seen_changes_;  // look at who is there
    }
    any_out_ |= helper->out;
  }
}

void Pool::wake(Helper& helper) {
  helper.calls.fetch_add(1);
  helper.calls.notify_one();
}

void Pool::await(Helper& helper) {
  const uint32_t version = notice_.version.load(std::memory_order_relaxed);
  const auto is_done = [&] { return helper.done.load(std::memory_order_acquire) == version; };
  for (int spins = 0; spins < SPINS_BETWEEN_CLOCKS; ++spins) {
    if (is_done()) return;
    pause();
  }
  // A helper with more work is waited for; only the time in which it did not run counts against it.
  double lost = 0;
  for (;;) {
    const double began = seconds(Clock::now()), ran = cpu_seconds(helper);
    const bool done = spin(SPIN_FOR_OTHERS, is_done);
    if (done && lost == 0) return;
    const double away = seconds(Clock::now()) - began - (cpu_seconds(helper) - ran);
    if (!done && away > AWAY_S) {
      wake(helper);  // it may have fallen asleep while the notice was written
      std::this_thread::sleep_for(NAP);
    }
    const double took = seconds(Clock::now()) - began;
    lost += std::max(0.0, took - (cpu_seconds(helper) - ran));
    if (done) break;
  }
  if (helper.attendance.late(seconds(Clock::now()), lost, threads_ - missing_)) {
    helper.out = any_out_ = true;
    --seen_changes_;  // it has no rank any more
  }
}

// A helper's CPU time, from the operating system; 0 if that is not available.
double Pool::cpu_seconds(const Helper& helper) {
#if defined(__linux__)
  timespec time{};
  if (clock_gettime(helper.cpu_clock, &time) == 0)
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
#else
  (void)helper;
#endif
  return 0;
}

void Pool::help(Helper& helper, int thread) {
  FlushDenormals flush;
#if defined(__linux__)
  pthread_getcpuclockid(pthread_self(), &helper.cpu_clock);
#endif
  helper.awake.store(true);
  changes_.fetch_add(1);
  uint32_t seen = 0;
  for (;;) {
    const uint32_t version = await_notice(helper, seen);
    if (stopping_.load(std::memory_order_relaxed)) return;
    if (version == seen) continue;
    seen = version;
    const int rank = helper.rank.load(std::memory_order_relaxed);
    // What a helper with a rank reads does not change until it is done; others may see the next ranks.
    std::atomic_thread_fence(std::memory_order_acquire);
    if (rank == 0 || notice_.version.load(std::memory_order_relaxed) != version) continue;
    do_share(notice_.job, notice_.work, Share{thread, rank, notice_.members}, helper.worked_s);
    helper.done.store(version, std::memory_order_release);
  }
}

// The version of the next notice, or of the last one again; sleeps if none comes for long.
uint32_t Pool::await_notice(Helper& helper, uint32_t seen) {
  uint32_t version = seen;
  const auto is_new = [&] {
    version = notice_.version.load(std::memory_order_acquire);
    return version != seen && version % 2 == 0;
  };
  if (spin(SPIN_FOR_WORK, is_new)) return version;
  const uint32_t calls = helper.calls.load();
  helper.awake.store(false);
  changes_.fetch_add(1);
  // A leader that has just seen us awake wakes us if it waits for long: checking once is enough.
  while (!is_new() && !stopping_.load() && helper.calls.load() == calls) helper.calls.wait(calls);
  helper.awake.store(true);
  changes_.fetch_add(1);
  return version % 2 == 0 ? version : seen;
}

void Pool::do_share(Job job, const void* work, const Share& share, double& worked_s) const {
  if (!timed_) return job(work, share);
  const Clock::time_point began = Clock::now();
  job(work, share);
  worked_s += std::chrono::duration<double>(Clock::now() - began).count();
}

double Pool::take_mean_members() {
  const double mean =
      shared_turns_ ? static_cast<double>(shared_members_) / static_cast<double>(shared_turns_) : threads_;
  shared_turns_ = shared_members_ = 0;
  return mean;
}

double Pool::take_worked_s() {
  double total = worked_s_;
  worked_s_ = 0;
  for (auto& helper : helpers_) {
    total += helper->worked_s;
    helper->worked_s = 0;
  }
  return total;
}

}  // namespace headrace
