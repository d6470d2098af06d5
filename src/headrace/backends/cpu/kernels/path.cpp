// Which paths this machine can run, asked of the processor once.
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "kernels.h"

namespace headrace {
namespace {

#if defined(__x86_64__)
// Compilers do not agree on a name for it: leaf 7, subleaf 1, bit 4 of eax.
bool has_avxvnni() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

#if defined(HEADRACE_AMX)
// Leaf 7, bits 24 (tiles) and 25 (int8) of edx. Palette 1, the only one there is, comes with them: a
// virtual machine may hide the leaf that describes it.
bool has_amx() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 1) && (d >> 25 & 1) && may_use_amx();
}
#endif
#endif

struct Paths {
  const Kernels* list[5];
  int count = 0;

  Paths() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512vnni")) {
#if defined(HEADRACE_AMX)
      if (has_amx()) list[count++] = &amx_kernels();
#endif
      list[count++] = &avx512_kernels();
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c")) {
      if (has_avxvnni()) list[count++] = &avxvnni_kernels();
      list[count++] = &avx2_kernels();
    }
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
