// Whether a thread of a pool is worth waiting for, by how long others waited while it did not run.
//
// On a machine with other work, a thread that lost its core returns some milliseconds later, and all
// others wait for it: a hundred times as long as the operation takes. Such a thread is left out for a
// while, then tried again. Knows no threads and no clock: the caller passes times, in seconds.
#pragma once

#include <algorithm>
#include <cmath>

namespace headrace {

class Attendance {
 public:
  // The caller waited until `now` for this thread, one of `members`, while it did not run. Returns true
  // if it should be left out from now on.
  bool late(double now, double waited, int members) {
    waited_ = waited_ * std::exp((last_ - now) / MEMORY_S) + waited;
    last_ = now;
    // Without it the others would have 1/members more to do: waiting for it may cost as much.
    if (waited_ < std::max(LEAST_S, WORTH * MEMORY_S / members)) return false;
    rest_s_ = now - joined_ < PROVEN_S ? std::min(2 * rest_s_, LONGEST_REST_S) : FIRST_REST_S;
    out_ = true;
    back_at_ = now + rest_s_;
    return true;
  }

  bool out() const { return out_; }

  // Whether it may be tried again. If so, half of the allowed waiting already counts against it.
  bool returns(double now, int members) {
    if (!out_ || now < back_at_) return false;
    out_ = false;
    joined_ = last_ = now;
    waited_ = std::max(LEAST_S, WORTH * MEMORY_S / members) / 2;
    return true;
  }

 private:
  static constexpr double MEMORY_S = 0.025;  // time constant of forgetting
  static constexpr double WORTH = 0.8;       // a little less than 1: one thread fewer also competes less
  static constexpr double LEAST_S = 0.002;   // an interrupt, a page fault
  static constexpr double FIRST_REST_S = 0.1;
  static constexpr double LONGEST_REST_S = 3.2;
  static constexpr double PROVEN_S = 1.0;  // after this long without failing, the back-off starts over

  double waited_ = 0, last_ = 0;
  double joined_ = -PROVEN_S, back_at_ = 0;
  double rest_s_ = FIRST_REST_S;
  bool out_ = false;
};

}  // namespace headrace
