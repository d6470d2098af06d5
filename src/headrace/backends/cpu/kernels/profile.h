// Where a step's time goes, operation by operation. Off unless asked for.
//
// The leading thread records how long an instruction took, how long all threads worked on it, and the
// amount of work. Knows operations by name only.
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
  double seconds = 0;   // until the last thread was done
  double worked_s = 0;  // of all threads, waiting left out
  Cost cost;
};

class Profile {
 public:
  using Clock = std::chrono::steady_clock;

  // The number of an operation; those of one name share it.
  int operation(const std::string& name) {
    const auto found = std::find(names_.begin(), names_.end(), name);
    if (found != names_.end()) return static_cast<int>(found - names_.begin());
    names_.push_back(name);
    return static_cast<int>(names_.size()) - 1;
  }

  bool enabled() const { return enabled_; }
  void enable(bool on) {
    enabled_ = on;
    notes_.assign(names_.size(), {});
  }

  void note(int operation, double seconds, double worked_s, const Cost& cost) {
    OperationTime& n = notes_[operation];
    ++n.calls;
    n.seconds += seconds;
    n.worked_s += worked_s;
    n.cost.multiplies += cost.multiplies;
    n.cost.bytes += cost.bytes;
  }

  // Returns what was recorded since the last call, and starts over.
  std::vector<OperationTime> take() {
    std::vector<OperationTime> times;
    for (size_t i = 0; i < notes_.size(); ++i)
      if (notes_[i].calls) {
        times.push_back(notes_[i]);
        times.back().name = names_[i];
      }
    enable(enabled_);
    return times;
  }

 private:
  std::vector<std::string> names_;
  std::vector<OperationTime> notes_;  // by operation
  bool enabled_ = false;
};

}  // namespace headrace
