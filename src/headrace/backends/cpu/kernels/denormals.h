// Denormal scales and activations make products 20 times slower, and nobody can tell them from 0:
// they are taken as 0 while one of these lives, on the thread that made it.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace {

class FlushDenormals {
 public:
#if defined(__x86_64__)
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  unsigned saved_;
#endif
};

}  // namespace headrace
