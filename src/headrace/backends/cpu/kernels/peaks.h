// The measured peak rates of the machine, to compare a profile with.
#pragma once

#include "kernels.h"
#include "pool.h"

namespace headrace {

// Per second, of all threads of a pool together: the best of several short measurements of each.
struct Peaks {
  double dots;    // int8 multiply-adds
  double floats;  // float32 multiply-adds
  double bytes;   // read from `read_bytes` of memory, each thread its own part
};

Peaks measure_peaks(const Kernels& kernels, Pool& pool, size_t read_bytes);

}  // namespace headrace
