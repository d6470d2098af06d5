#include "pool.h"

#include <algorithm>
#include <bit>
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
// What the leader then sleeps between two looks: little beside the time slice that it waits for.
constexpr std::chrono::microseconds NAP{100};
constexpr int SPINS_BETWEEN_CLOCKS = 64;
// A helper that was woken is woken again after so many turns, should it have fallen asleep unseen.
constexpr uint32_t TURNS_BETWEEN_CALLS = 64;
// Whether someone may come back is looked at so rarely: it takes a clock.
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

// Looks at whether `is_there()` until it is, for so long at most. Whether it became so.
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

int HelperSet::count() const {
  int total = 0;
  for (const uint64_t word : words) total += std::popcount(word);
  return total;
}

int HelperSet::count_below(int i) const {
  int total = 0;
  for (int w = 0; w < i / 64; ++w) total += std::popcount(words[w]);
  return total + std::popcount(words[i / 64] & ((uint64_t{1} << (i % 64)) - 1));
}

void HelperSet::keep_first(int most) {
  for (uint64_t& word : words) {
    while (std::popcount(word) > most) word &= ~std::bit_floor(word);
    most -= std::popcount(word);
  }
}

Pool::Pool(int threads) : threads_(std::max(1, threads)) {
  if (threads_ - 1 > HelperSet::MOST) throw std::invalid_argument("too many threads");
  for (int i = 0; i < threads_ - 1; ++i) {
    helpers_.push_back(std::make_unique<Helper>());
    helpers_[i]->called_at = turn_ - TURNS_BETWEEN_CALLS;
  }
  for (int i = 0; i < threads_ - 1; ++i)
    helpers_[i]->thread = std::thread([this, i] { help(*helpers_[i], i); });
}

Pool::~Pool() {
  stopping_.store(true);
  for (auto& helper : helpers_) wake(*helper);
  for (auto& helper : helpers_) helper->thread.join();
}

void Pool::run_job(int most, Job job, const void* work) {
  if (most <= 1 || threads_ == 1) return do_share(job, work, Share{0, 0, 1}, worked_s_);
  const HelperSet called = gather(most);
  const int members = called.count() + 1;
  if (members > 1) publish(called, members, job, work);
  do_share(job, work, Share{0, 0, members}, worked_s_);
  if (members > 1)
    for (int i = 0; i < threads_ - 1; ++i)
      if (called.has(i)) await(i, members);
}

// Those who are there, at most so many threads with the caller; the others are woken.
HelperSet Pool::gather(int most) {
  ++turn_;
  if (any_out_ && turn_ % TURNS_BETWEEN_LOOKS == 0) look_for_returns();
  HelperSet awake;
  for (int w = 0; w < HelperSet::WORDS; ++w)
    awake.words[w] = awake_[w].load(std::memory_order_relaxed) & ~out_.words[w];
  if (awake.count() + 1 < threads_)
    for (int i = 0; i < threads_ - 1; ++i) {
      if (awake.has(i) || out_.has(i)) continue;
      Helper& helper = *helpers_[i];
      if (turn_ - helper.called_at < TURNS_BETWEEN_CALLS) continue;
      helper.called_at = turn_;
      wake(helper);
    }
  if (most >= threads_) {
    ++shared_turns_;
    shared_members_ += awake.count() + 1;
  } else {
    awake.keep_first(most - 1);
  }
  return awake;
}

void Pool::look_for_returns() {
  const double now = seconds(Clock::now());
  for (int i = 0; i < threads_ - 1; ++i)
    if (out_.has(i) && helpers_[i]->attendance.returns(now, threads_)) {
      out_.remove(i);
      helpers_[i]->called_at = turn_ - TURNS_BETWEEN_CALLS;
    }
  any_out_ = out_.count() > 0;
}

void Pool::wake(Helper& helper) {
  helper.calls.fetch_add(1, std::memory_order_seq_cst);
  helper.calls.notify_one();
}

void Pool::publish(const HelperSet& called, int members, Job job, const void* work) {
  const uint32_t version = notice_.version.load(std::memory_order_relaxed);
  notice_.version.store(version + 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  if (called != last_called_) {
    for (int w = 0; w < HelperSet::WORDS; ++w)
      notice_.called[w].store(called.words[w], std::memory_order_relaxed);
    last_called_ = called;
  }
  notice_.members = members;
  notice_.job = job;
  notice_.work = work;
  notice_.version.store(version + 2, std::memory_order_release);
}

void Pool::await(int i, int members) {
  Helper& helper = *helpers_[i];
  const uint32_t version = notice_.version.load(std::memory_order_relaxed);
  const auto is_done = [&] { return helper.done.load(std::memory_order_acquire) == version; };
  for (int spins = 0; spins < SPINS_BETWEEN_CLOCKS; ++spins) {
    if (is_done()) return;
    pause();
  }
  const Clock::time_point began = Clock::now();
  if (spin(SPIN_FOR_OTHERS, is_done)) return;
  wake(helper);  // it may have fallen asleep while the notice was written
  while (!is_done()) std::this_thread::sleep_for(NAP);
  const Clock::time_point now = Clock::now();
  const double waited = std::chrono::duration<double>(now - began).count();
  if (helper.attendance.late(seconds(now), waited, members)) {
    out_.add(i);
    any_out_ = true;
  }
}

void Pool::help(Helper& helper, int i) {
  FlushDenormals flush;
  set_awake(i, true);
  uint32_t seen = 0;
  for (;;) {
    const uint32_t version = await_notice(helper, i, seen);
    if (stopping_.load(std::memory_order_relaxed)) return;
    if (version == seen) continue;
    seen = version;
    HelperSet called;
    for (int w = 0; w < HelperSet::WORDS; ++w)
      called.words[w] = notice_.called[w].load(std::memory_order_relaxed);
    // Whoever is called reads what stays until he is done; others may have read half of the next one.
    std::atomic_thread_fence(std::memory_order_acquire);
    if (notice_.version.load(std::memory_order_relaxed) != seen || !called.has(i)) continue;
    const Share share{i + 1, called.count_below(i) + 1, notice_.members};
    do_share(notice_.job, notice_.work, share, helper.worked_s);
    helper.done.store(seen, std::memory_order_release);
  }
}

// The version of the next notice, or of the last one again; sleeps where none comes for long.
uint32_t Pool::await_notice(Helper& helper, int i, uint32_t seen) {
  uint32_t version = seen;
  const auto is_new = [&] {
    version = notice_.version.load(std::memory_order_acquire);
    return version != seen && version % 2 == 0;
  };
  if (spin(SPIN_FOR_WORK, is_new)) return version;
  const uint32_t calls = helper.calls.load(std::memory_order_seq_cst);
  set_awake(i, false);
  // A leader who has just seen us awake calls when he has waited for long: it is enough to look once.
  while (!is_new() && !stopping_.load() && helper.calls.load() == calls) helper.calls.wait(calls);
  set_awake(i, true);
  return version % 2 == 0 ? version : seen;
}

void Pool::set_awake(int i, bool awake) {
  const uint64_t bit = uint64_t{1} << (i % 64);
  if (awake) awake_[i / 64].fetch_or(bit);
  else awake_[i / 64].fetch_and(~bit);
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
