// The table of kernels that one path (an instruction set) provides.
//
// Each path_*.cpp fills one in from the same headers, compiled for its own instruction set. A row's
// result never depends on the other rows of a call: every kernel does the same float operations in
// the same order for a row, whether it comes alone or in a batch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "packed.h"

namespace headrace {

constexpr int MAX_TILE_ROWS = 6;
constexpr int MAX_TILE_BLOCKS = 4;
constexpr int MATRIX_ROWS = 16;  // most rows of a tile that a matrix unit multiplies

// Activations quantized for a tile of R rows. For each 32 inputs:
//   int8 [R][32], float scale [R], float scale * sum [R], int32 sum [R], int32 sum of 16 [R]
constexpr int QUANTIZED_GROUP = 32;
constexpr int QUANTIZED_BYTES = 32 + 4 * 4;  // a row's share of a group
inline int padded_inputs(int inputs) {
  return (inputs + RECORD_INPUTS - 1) / RECORD_INPUTS * RECORD_INPUTS;
}
// Two 4-bit blocks taken apart. For each 32 inputs: codes at a byte each, scales and minimums as floats.
constexpr int UNPACKED_BLOCKS = 2;
inline size_t unpacked_bytes(int inputs) {
  constexpr size_t group = LANES * (QUANTIZED_GROUP + 2 * sizeof(float)) * UNPACKED_BLOCKS;
  return padded_inputs(inputs) / QUANTIZED_GROUP * group;
}
inline size_t quantized_row_bytes(int inputs) {
  return static_cast<size_t>(padded_inputs(inputs) / QUANTIZED_GROUP) * QUANTIZED_BYTES;
}

// R rows times `blocks` blocks of 16 outputs, each block with a stream of its own.
struct Tile {
  const uint8_t* streams[MAX_TILE_BLOCKS];
  const float* bias[MAX_TILE_BLOCKS];  // of the block's first output, or null
  float* out[MAX_TILE_BLOCKS];         // row 0, the block's first output
  const float* added[MAX_TILE_BLOCKS];  // likewise, of what the product is added to; or null
  int lanes[MAX_TILE_BLOCKS];          // outputs that exist: 16 but for the last block
  // What will be read after this tile, to be prefetched meanwhile: `ahead_lines` cache lines of each
  // stream for each record of this one.
  const uint8_t* ahead[MAX_TILE_BLOCKS];
  int ahead_lines;
  uint8_t* unpacked;  // room for the tile's 4-bit blocks taken apart
  int inputs;
  int records;
  int zero;
  size_t out_stride;     // floats from a row to the next
  const uint8_t* rows;   // quantized kinds: the tile's activations
  const float* floats;   // float kinds: row 0
  size_t floats_stride;  // float kinds: floats from a row to the next
};
using TileKernel = void (*)(const Tile&);

// How a pool keeps keys and values. Int8: codes of one head and token share a float scale.
enum class KvDtype { F32, F16, BF16, Int8 };
constexpr int KV_DTYPES = 4;
constexpr int BLOCK_TOKENS = LANES;  // a block's tokens are the lanes of a vector

// Sixteen tokens of one head's keys, or values; int8 has its sixteen scales after them.
inline size_t kv_head_bytes(KvDtype dtype, int head_dim) {
  const size_t values = static_cast<size_t>(BLOCK_TOKENS) * head_dim;
  switch (dtype) {
    case KvDtype::F32: return values * 4;
    case KvDtype::Int8: return values + BLOCK_TOKENS * sizeof(float);
    default: return values * 2;
  }
}

// Queries that attention takes together, so that each key and value is read once for all of them.
constexpr int QUERIES_TOGETHER = 12;

// Rows of one sequence, with the query heads that share one KV head, that fit together.
inline int attended_rows(int group) {
  return group < QUERIES_TOGETHER ? QUERIES_TOGETHER / group : 1;
}

// Attention of up to attended_rows() rows of one sequence, at consecutive positions, for the query
// heads that share one KV head.
struct Attend {
  const float* queries;   // [rows][group][head_dim]
  float* out;             // likewise
  size_t query_stride;    // floats from a row to the next
  size_t out_stride;
  const uint8_t* kv;      // the pool
  const int32_t* table;   // block numbers of the sequence
  size_t block_bytes;     // from a block to the next in the pool
  size_t key_offset;      // of this layer's and head's keys in a block: [head_dim][16], scales
  size_t value_offset;    // likewise values: [16][head_dim], scales
  int rows;
  int position;           // of the first row
  int window;             // positions that a row sees, its own among them; 0: all up to its own
  int group;              // query heads
  int head_dim;
  float scale;
  float softcap;          // 0: none
  float* scratch;         // [QUERIES_TOGETHER][head_dim + positions rounded out to blocks]
  bool is_first;          // of its sequence in this step: nobody has read these keys and values yet
  // The task whose keys are needed next: prefetched while this one's values are added. Null: none.
  const int32_t* next_table;
  size_t next_key_offset;
  int next_first, next_end;  // its blocks

  int last(int row) const { return position + row; }
  int first(int row) const { return first_seen(last(row)); }
  int first_seen(int from) const {
    return window > 0 && from >= window ? from - window + 1 : 0;
  }
};

struct Kernels {
  const char* name;

  // rows of x [rows][inputs] -> one tile of activations
  void (*quantize)(const float* x, size_t stride, int rows, int inputs, uint8_t* out);
  // [kind][blocks - 1][rows - 1]; null where the path has no such tile
  TileKernel tiles[QUANTIZED_KINDS + FLOAT_KINDS][MAX_TILE_BLOCKS][MAX_TILE_ROWS];
  // [kind][rows - 1], of two blocks: the first row tile of a panel unpacks its nibbles, the others
  // read them; null where that is no gain
  TileKernel unpacking[FOUR_BIT_KINDS][MAX_TILE_ROWS];
  TileKernel unpacked[FOUR_BIT_KINDS][MAX_TILE_ROWS];
  // Tiles of one block for a matrix unit, [kind][rows - 1]; they read the block as unpack() left it in
  // Tile::unpacked. All null where the path has no such unit.
  struct Matrix {
    void (*begin)();  // a thread's products are about to use the unit
    void (*end)();
    void (*unpack[QUANTIZED_KINDS])(const uint8_t* stream, int records, int zero, uint8_t* to);
    TileKernel tiles[QUANTIZED_KINDS][MATRIX_ROWS];
  } matrix;

  void (*norm)(const float* x, const float* weight, float eps, int n, float* out);
  void (*rope)(float* head, const float* cosines, const float* sines, int half, bool interleaved);
  void (*gated)(const float* gate_up, bool gelu, int n, float* out);
  void (*add)(const float* x, const float* y, int n, float* out);
  void (*softcap)(const float* x, float cap, int n, float* out);

  // [KvDtype]
  void (*write_kv[KV_DTYPES])(const float* key, const float* value, int head_dim, int slot,
                              uint8_t* keys, uint8_t* values);
  void (*attend[KV_DTYPES])(const Attend&);

  // Of a row of logits: the maximum, and the log of the sum of exp(x - maximum).
  void (*log_sum_exp)(const float* x, int n, float* maximum, double* log_sum);
  // out = exp((x - shift) * scale)
  void (*exponentials)(const float* x, float shift, float scale, int n, float* out);

  // What a core can do at most: int8 and float multiply-adds made, and memory read.
  int64_t (*dot_loop)(int rounds);
  int64_t (*float_loop)(int rounds);
  void (*read_loop)(const uint8_t* data, size_t bytes);
};

const Kernels& portable_kernels();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avxvnni_kernels();
const Kernels& avx512_kernels();
const Kernels& amx_kernels();
// Asks the operating system to save the unit's registers for this process, and tries the unit once.
bool may_use_amx();
#elif defined(__aarch64__)
const Kernels& neon_kernels();
const Kernels& dotprod_kernels();
#endif

// Paths this machine can run, best first; nullptr for a name that is not among them.
const Kernels* find_path(const char* name);
const Kernels& best_path();
int path_count();
const Kernels& path_at(int i);

}  // namespace headrace
