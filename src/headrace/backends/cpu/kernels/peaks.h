// What the machine can do at most, measured: the yardstick for a profile.
#pragma once

#include "kernels.h"
#include "pool.h"

namespace headrace {

// Of all threads of a pool together, a second: the best of several short tries of each.
struct Peaks {
  double dots;    // int8 multiply-adds
  double floats;  // float32 multiply-adds
  double bytes;   // read from `read_bytes` of memory, each thread its own part
};

Peaks measure_peaks(const Kernels& kernels, Pool& pool, size_t read_bytes);

}  // namespace headrace
