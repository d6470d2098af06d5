// Where a step's time goes, operation by operation. Off unless asked for.
//
// Each thread notes how long it worked on an instruction and how long that took with the wait at
// the barrier behind it; thread 0 also notes what the instruction had to do. Knows operations by
// name only.
#pragma once

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

namespace headrace {

// What an instruction must do at least: multiply-adds, and bytes of weights or of KV blocks.
struct Cost {
  double multiplies = 0;
  double bytes = 0;
};

// Of all instructions of one name since the profile was last taken.
struct OperationTime {
  std::string name;
  int64_t calls = 0;
  double seconds = 0;   // from start to the end of the barrier, on thread 0
  double worked_s = 0;  // of all threads, barriers left out
  Cost cost;
};

class Profile {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Profile(int threads) : threads_(threads) {}

  // The number of an operation; those of one name share it.
  int operation(const std::string& name) {
    const auto found = std::find(names_.begin(), names_.end(), name);
    if (found != names_.end()) return static_cast<int>(found - names_.begin());
    names_.push_back(name);
    return static_cast<int>(names_.size()) - 1;
  }

  bool enabled() const { return !notes_.empty(); }
  void enable(bool on) {
    notes_.clear();
    if (on) notes_.resize(names_.size() * threads_);
  }

  void note(int operation, int thread, Clock::time_point began, Clock::time_point worked,
            const Cost& cost) {
    Note& n = notes_[thread * names_.size() + operation];
    const Clock::time_point ended = Clock::now();
    ++n.calls;
    n.seconds += std::chrono::duration<double>(ended - began).count();
    n.worked_s += std::chrono::duration<double>(worked - began).count();
    n.cost.multiplies += cost.multiplies;
    n.cost.bytes += cost.bytes;
  }

  // What was noted since the last time, and from nothing again.
  std::vector<OperationTime> take() {
    std::vector<OperationTime> times;
    for (size_t i = 0; i < names_.size() && enabled(); ++i) {
      const Note& first = notes_[i];
      OperationTime t{names_[i], first.calls, first.seconds, 0, first.cost};
      for (int thread = 0; thread < threads_; ++thread)
        t.worked_s += notes_[thread * names_.size() + i].worked_s;
      if (t.calls) times.push_back(t);
    }
    if (enabled()) enable(true);
    return times;
  }

 private:
  // A thread's own, on lines of its own.
  struct alignas(64) Note {
    int64_t calls = 0;
    double seconds = 0;
    double worked_s = 0;
    Cost cost;
  };

  int threads_;
  std::vector<std::string> names_;
  std::vector<Note> notes_;  // [thread][operation]; none while the profile is off
};

}  // namespace headrace
