// Which paths this machine can run, asked of the processor once.
#include <cstring>

#include "kernels.h"

namespace headrace {
namespace {

struct Paths {
  const Kernels* list[3];
  int count = 0;

  Paths() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512vnni"))
      list[count++] = &avx512_kernels();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c"))
      list[count++] = &avx2_kernels();
#endif
    list[count++] = &portable_kernels();
  }
};

const Paths& paths() {
  static const Paths all;
  return all;
}

}  // namespace

const Kernels* find_path(const char* name) {
  for (int i = 0; i < paths().count; ++i)
    if (std::strcmp(paths().list[i]->name, name) == 0) return paths().list[i];
  return nullptr;
}

const Kernels& best_path() { return *paths().list[0]; }
int path_count() { return paths().count; }
const Kernels& path_at(int i) { return *paths().list[i]; }

}  // namespace headrace
