// The AMX path: AVX-512 VNNI, and for many rows the matrix unit, which multiplies 16 rows with 16
// outputs at once.
//
// Its int8 sums are whole numbers, as VNNI's are, and they are scaled and added in the order of tile.h:
// a row's results are the same bits. Codes go in signed, so that no zero point is left to take away.
#include <immintrin.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "kernels.h"
#include "shape.h"

namespace headrace {
namespace {

// Registers of the unit. Sums of a record's two halves, or of its four groups of 16 inputs; rows and
// codes of 32 inputs, and of 16.
constexpr int SUMS = 0, ROWS = 4, CODES = 5, ROWS16 = 6, CODES16 = 7;

struct alignas(64) Settings {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  constexpr Settings() {
    for (int i = SUMS; i < ROWS; ++i) set(i, MATRIX_ROWS, LANES * 4);
    set(ROWS, MATRIX_ROWS, 32);
    set(CODES, 8, LANES * 4);
    set(ROWS16, MATRIX_ROWS, 16);
    set(CODES16, 4, LANES * 4);
  }
  constexpr void set(int i, int count, int bytes) {
    rows[i] = static_cast<uint8_t>(count);
    row_bytes[i] = static_cast<uint16_t>(bytes);
  }
};
static_assert(sizeof(Settings) == 64);
constexpr Settings SETTINGS;

// The compiler's own intrinsics do not say what memory they read (g++ 12): stores before them may go.
void begin() { asm volatile("ldtilecfg %0" ::"m"(SETTINGS)); }
void end() { asm volatile("tilerelease"); }

template <int T>
HEADRACE_INLINE void load_matrix(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int T>
HEADRACE_INLINE void store_matrix(void* p) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(int64_t{64}), "i"(T) : "memory");
}
template <int Sum, int Row, int Code>
HEADRACE_INLINE void multiply_matrices() {
  asm volatile("tilezero %%tmm%c0\n\ttdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(Row),
               "i"(Code));
}

// A block's share of 32 inputs, taken apart: signed codes at a byte each, then factors as floats.
template <Kind K>
constexpr int GROUP_BYTES = 512 + 64 * (Shape<K>::groups + (Shape<K>::minimum ? 1 : 0));

template <Kind K>
void unpack(const uint8_t* record, int records, int zero, uint8_t* to) {
  using S = Shape<K>;
  const __m512i low = _mm512_set1_epi8(0x0f);
  const __m512i taken = _mm512_set1_epi8(static_cast<char>(S::minimum ? 0 : zero));
  const auto factors = [](const uint8_t* halves, uint8_t* floats) {
    _mm512_storeu_ps(floats, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves))));
  };
  for (int i = 0; i < records; ++i, record += S::record_bytes)
    for (int half = 0; half < 2; ++half, to += GROUP_BYTES<K>) {
      const uint8_t* codes = record + half * S::half_codes;
      const uint8_t* scales = record + S::scales_at + half * S::groups * LANES * 2;
      if constexpr (S::four_bits) {
        for (int c = 0; c < 4; ++c) {
          const __m512i both = _mm512_loadu_si512(codes + 64 * c);
          const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
          _mm512_storeu_si512(to + 128 * c, _mm512_sub_epi8(_mm512_and_si512(both, low), taken));
          _mm512_storeu_si512(to + 128 * c + 64, _mm512_sub_epi8(high, taken));
        }
      } else {
        for (int c = 0; c < 8; ++c)
          _mm512_storeu_si512(to + 64 * c, _mm512_sub_epi8(_mm512_loadu_si512(codes + 64 * c), taken));
      }
      for (int g = 0; g < S::groups; ++g) factors(scales + g * LANES * 2, to + 512 + 64 * g);
      if constexpr (S::minimum) factors(scales + S::scales_bytes, to + 512 + 64);
    }
}

using Whole = int32_t[MATRIX_ROWS][LANES];

// Sums of a record's first or second 32 inputs, in registers of their own for each half.
template <Kind K, int Half>
HEADRACE_INLINE void multiply_half(const uint8_t* rows, const uint8_t* codes) {
  if constexpr (Shape<K>::groups == 1) {
    load_matrix<ROWS>(rows, QUANTIZED_GROUP);
    load_matrix<CODES>(codes, 64);
    multiply_matrices<SUMS + Half, ROWS, CODES>();
  } else {
    load_matrix<ROWS16>(rows, QUANTIZED_GROUP);
    load_matrix<CODES16>(codes, 64);
    multiply_matrices<SUMS + 2 * Half, ROWS16, CODES16>();
    load_matrix<ROWS16>(rows + 16, QUANTIZED_GROUP);
    load_matrix<CODES16>(codes + 256, 64);
    multiply_matrices<SUMS + 2 * Half + 1, ROWS16, CODES16>();
  }
}

// One matrix for each group of inputs that share a scale.
template <Kind K, int Half>
HEADRACE_INLINE void store_half(Whole* to) {
  constexpr int groups = Shape<K>::groups;
  store_matrix<SUMS + groups * Half>(to[0]);
  if constexpr (groups == 2) store_matrix<SUMS + groups * Half + 1>(to[1]);
}

template <Kind K, int R>
HEADRACE_INLINE void add_scaled(const uint8_t* rows, const uint8_t* factors, const Whole* whole,
                                __m512 (&sums)[R]) {
  const Group<R> group(rows);
  for (int g = 0; g < Shape<K>::groups; ++g) {
    const __m512 scale = _mm512_loadu_ps(factors + 64 * g);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(whole[g][r]));
      sums[r] = _mm512_fmadd_ps(sum, _mm512_mul_ps(scale, _mm512_set1_ps(group.scales[r])), sums[r]);
    }
  }
  if constexpr (Shape<K>::minimum) {
    const __m512 minimum = _mm512_loadu_ps(factors + 64);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      sums[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(group.scaled_sums[r]), sums[r]);
  }
}

// The sums of R rows and one block.
template <Kind K, int R>
HEADRACE_INLINE void matrix_pass(const Tile& t, __m512 (&sums)[R]) {
  constexpr size_t row_bytes = R * QUANTIZED_BYTES;
  constexpr size_t code_bytes = GROUP_BYTES<K>;
  alignas(64) Whole first[Shape<K>::groups], second[Shape<K>::groups];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) sums[r] = _mm512_setzero_ps();
  const uint8_t *rows = t.rows, *codes = t.unpacked;
  const int records = t.records;
  for (int record = 0; record < records; ++record, rows += 2 * row_bytes, codes += 2 * code_bytes) {
    multiply_half<K, 0>(rows, codes);
    multiply_half<K, 1>(rows + row_bytes, codes + code_bytes);
    ask_ahead(t, 0, record);
    store_half<K, 0>(first);
    store_half<K, 1>(second);
    add_scaled<K, R>(rows, codes + 512, first, sums);
    add_scaled<K, R>(rows + row_bytes, codes + code_bytes + 512, second, sums);
  }
}

template <Kind K, int R>
void matrix_tile(const Tile& t) {
  // Through memory: what follows calls functions, for which the sums would leave their registers.
  alignas(64) float done[R][LANES];
  {
    __m512 sums[R];
    matrix_pass<K, R>(t, sums);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) _mm512_store_ps(done[r], sums[r]);
  }
  asm volatile("" ::: "memory");
  for (int r = 0; r < R; ++r) store_outputs(t, 0, r, load(done[r]));
}

template <Kind K, int... R>
void fill_kind(Kernels::Matrix& matrix, std::integer_sequence<int, R...>) {
  constexpr int kind = static_cast<int>(K);
  matrix.unpack[kind] = unpack<K>;
  ((matrix.tiles[kind][R] = matrix_tile<K, R + 1>), ...);
}

template <int... K>
void fill_kinds(Kernels::Matrix& matrix, std::integer_sequence<int, K...>) {
  constexpr auto rows = std::make_integer_sequence<int, MATRIX_ROWS>{};
  (fill_kind<static_cast<Kind>(K)>(matrix, rows), ...);
}

}  // namespace

const Kernels& amx_kernels() {
  static const Kernels table = [] {
    Kernels made = avx512_kernels();
    made.name = "amx";
    made.matrix.begin = begin;
    made.matrix.end = end;
    fill_kinds(made.matrix, std::make_integer_sequence<int, QUANTIZED_KINDS>{});
    return made;
  }();
  return table;
}

namespace {

sigjmp_buf after_fault;

// Whether the unit really works: a virtual machine may announce it without having it.
bool multiplies() {
  struct sigaction before, here = {};
  here.sa_handler = [](int) { siglongjmp(after_fault, 1); };
  if (sigaction(SIGILL, &here, &before) != 0) return false;
  bool good = false;
  if (sigsetjmp(after_fault, 1) == 0) {
    alignas(64) int8_t ones[MATRIX_ROWS * 32];
    alignas(64) Whole sums = {};
    std::memset(ones, 1, sizeof ones);
    begin();
    load_matrix<ROWS>(ones, 32);
    load_matrix<CODES>(ones, 64);
    multiply_matrices<SUMS, ROWS, CODES>();
    store_matrix<SUMS>(sums);
    end();
    good = sums[0][0] == 32 && sums[MATRIX_ROWS - 1][LANES - 1] == 32;
  }
  sigaction(SIGILL, &before, nullptr);
  return good;
}

}  // namespace

bool may_use_amx() {
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 && multiplies();
}

}  // namespace headrace
