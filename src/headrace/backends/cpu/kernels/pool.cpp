#include "pool.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "denormals.h"

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
// How long the leader looks at one who is not done. Shares are even within microseconds: past this
// the other has lost its core, and may be waiting for ours.
constexpr std::chrono::microseconds SPIN_FOR_OTHERS{100};
constexpr int SPINS_BETWEEN_CLOCKS = 64;
// A helper that was called is called again after so many turns, should it have fallen asleep unseen.
constexpr uint32_t TURNS_BETWEEN_CALLS = 64;
// Whether someone may come back is looked at so rarely: it takes a clock.
constexpr uint32_t TURNS_BETWEEN_LOOKS = 32;

// A ticket: the turn in the upper bits, so that it differs from those before; the rank below, or 0
// for someone who is only called.
constexpr int RANK_BITS = 10;
constexpr uint32_t MOST_THREADS = (1 << RANK_BITS) - 1;

uint32_t make_ticket(uint32_t turn, int rank) {
  return turn << RANK_BITS | static_cast<uint32_t>(rank);
}

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

// Looks at `word` until it is other than `seen`, for so long at most. Whether it became so.
bool spin(const std::atomic<uint32_t>& word, uint32_t seen, Clock::duration longest) {
  for (int i = 0; i < SPINS_BETWEEN_CLOCKS; ++i) {
    if (word.load(std::memory_order_acquire) != seen) return true;
    pause();
  }
  const Clock::time_point until = Clock::now() + longest;
  do {
    for (int i = 0; i < SPINS_BETWEEN_CLOCKS; ++i) {
      if (word.load(std::memory_order_acquire) != seen) return true;
      pause();
    }
  } while (Clock::now() < until);
  return false;
}

}  // namespace

Pool::Pool(int threads) : threads_(std::max(1, threads)) {
  if (threads_ > static_cast<int>(MOST_THREADS)) throw std::invalid_argument("too many threads");
  for (int t = 1; t < threads_; ++t) {
    helpers_.push_back(std::make_unique<Helper>());
    helpers_.back()->woken = turn_ - TURNS_BETWEEN_CALLS;
  }
  for (int t = 1; t < threads_; ++t) {
    Helper& helper = *helpers_[t - 1];
    helper.thread = std::thread([this, &helper, t] { help(helper, t); });
  }
}

Pool::~Pool() {
  stopping_.store(true);
  ++turn_;
  for (auto& helper : helpers_) call(*helper);
  for (auto& helper : helpers_) helper->thread.join();
}

void Pool::run_job(int most, Job job, const void* work) {
  const int members = gather(std::min(most, threads_));
  if (members > 1) {
    ++turn_;
    job_ = job;
    work_ = work;
    members_ = members;
    for (auto& helper : helpers_) {
      if (!helper->rank) continue;
      // In one order with the helper's own word that it sleeps: one of the two sees the other's.
      helper->ticket.store(make_ticket(turn_, helper->rank), std::memory_order_seq_cst);
      if (!helper->awake.load(std::memory_order_seq_cst)) helper->ticket.notify_one();
    }
  }
  do_share(job, work, Share{0, 0, members}, worked_s_);
  if (members > 1)
    for (auto& helper : helpers_)
      if (helper->rank) await(*helper, make_ticket(turn_, helper->rank), members);
}

// Gives a rank to every helper that is there, up to `most` threads in all; calls those who sleep.
int Pool::gather(int most) {
  if (most == 1) return 1;
  if (out_ && turn_ % TURNS_BETWEEN_LOOKS == 0) look_for_returns();
  int members = 1;
  for (auto& helper : helpers_) {
    helper->rank = 0;
    if (helper->attendance.out()) continue;
    if (helper->awake.load(std::memory_order_relaxed)) {
      helper->woken = turn_ - TURNS_BETWEEN_CALLS;
      if (members < most) helper->rank = members++;
    } else if (turn_ - helper->woken >= TURNS_BETWEEN_CALLS) {
      ++turn_;
      helper->woken = turn_;
      call(*helper);
    }
  }
  // Turns go on while the leader is alone, so that it looks and calls again.
  if (members == 1) ++turn_;
  if (most == threads_) {
    ++shared_turns_;
    shared_members_ += members;
  }
  return members;
}

void Pool::look_for_returns() {
  const double now = seconds(Clock::now());
  for (auto& helper : helpers_)
    if (helper->attendance.returns(now, threads_)) --out_;
}

// Wakes a helper without a share: it will be there for the next turn.
void Pool::call(Helper& helper) {
  helper.ticket.store(make_ticket(turn_, 0), std::memory_order_seq_cst);
  helper.ticket.notify_one();
}

void Pool::await(Helper& helper, uint32_t ticket, int members) {
  for (int i = 0; i < SPINS_BETWEEN_CLOCKS; ++i) {
    if (helper.done.load(std::memory_order_acquire) == ticket) return;
    pause();
  }
  const Clock::time_point began = Clock::now();
  uint32_t done = helper.done.load(std::memory_order_acquire);
  while (done != ticket) {
    if (!spin(helper.done, done, SPIN_FOR_OTHERS)) helper.done.wait(done);
    done = helper.done.load(std::memory_order_acquire);
  }
  const Clock::time_point now = Clock::now();
  const double waited = std::chrono::duration<double>(now - began).count();
  if (now - began > SPIN_FOR_OTHERS && helper.attendance.late(seconds(now), waited, members)) ++out_;
}

void Pool::help(Helper& helper, int thread) {
  FlushDenormals flush;
  uint32_t seen = 0;
  for (;;) {
    helper.awake.store(true, std::memory_order_seq_cst);
    if (!spin(helper.ticket, seen, SPIN_FOR_WORK)) {
      helper.awake.store(false, std::memory_order_seq_cst);
      helper.ticket.wait(seen, std::memory_order_seq_cst);
    }
    seen = helper.ticket.load(std::memory_order_acquire);
    if (stopping_.load()) return;
    const int rank = static_cast<int>(seen & MOST_THREADS);
    if (rank == 0) continue;
    do_share(job_, work_, Share{thread, rank, members_}, helper.worked_s);
    helper.done.store(seen, std::memory_order_seq_cst);
    helper.done.notify_one();  // no system call unless the leader sleeps
  }
}

void Pool::do_share(Job job, const void* work, const Share& share, double& worked_s) const {
  if (!timed_) return job(work, share);
  const Clock::time_point began = Clock::now();
  job(work, share);
  worked_s += std::chrono::duration<double>(Clock::now() - began).count();
}

double Pool::take_mean_members() {
  const double mean = shared_turns_ ? static_cast<double>(shared_members_) / static_cast<double>(shared_turns_) : threads_;
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
