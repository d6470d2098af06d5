// Which paths this machine can run, asked of the processor once; on ARM, where a program may not ask
// it, of the operating system.
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include "kernels.h"

namespace headrace {
namespace {

#if defined(__x86_64__)
// Compilers do not agree on names for these two. Leaf 1, bit 29 of ecx: it works on the registers of
// AVX, so that whoever may use AVX2 may use it.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}

// Leaf 7, subleaf 1, bit 4 of eax.
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
#elif defined(__aarch64__)
bool has_dotprod() {
#if defined(__linux__)
  constexpr unsigned long DOT_PRODUCT = 1ul << 20;  // HWCAP_ASIMDDP
  return getauxval(AT_HWCAP) & DOT_PRODUCT;
#elif defined(__APPLE__)
  int has = 0;
  size_t size = sizeof has;
  return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, nullptr, 0) == 0 && has;
#else
  return false;
#endif
}
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
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) {
      if (has_avxvnni()) list[count++] = &avxvnni_kernels();
      list[count++] = &avx2_kernels();
    }
#elif defined(__aarch64__)
    if (has_dotprod()) list[count++] = &dotprod_kernels();
    list[count++] = &neon_kernels();
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
