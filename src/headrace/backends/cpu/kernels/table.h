// A path's table of kernels, put together from the headers that it was compiled with. Included last
// by each path, after its Unit (tile.h).
#pragma once

#include <utility>

#include "attention.h"
#include "elementwise.h"
#include "peak.h"
#include "quantize.h"
#include "tile.h"

namespace headrace {
namespace {

template <Kind K, int B, int... R>
void fill_rows(TileKernel (&rows)[MAX_TILE_ROWS], std::integer_sequence<int, R...>) {
  ((rows[R] = tile<K, Nibbles::Packed, B, R + 1>), ...);
}

template <Kind K, int... R>
void fill_unpacked(Kernels& table, std::integer_sequence<int, R...>) {
  constexpr int kind = static_cast<int>(K);
  ((table.unpacking[kind][R] = tile<K, Nibbles::Unpacking, UNPACKED_BLOCKS, R + 1>), ...);
  ((table.unpacked[kind][R] = tile<K, Nibbles::Unpacked, UNPACKED_BLOCKS, R + 1>), ...);
}

template <Kind K>
void fill_blocks(TileKernel (&blocks)[MAX_TILE_BLOCKS][MAX_TILE_ROWS]) {
  fill_rows<K, 1>(blocks[0], std::make_integer_sequence<int, Unit::rows[0]>{});
  fill_rows<K, 2>(blocks[1], std::make_integer_sequence<int, Unit::rows[1]>{});
  fill_rows<K, 3>(blocks[2], std::make_integer_sequence<int, Unit::rows[2]>{});
  fill_rows<K, 4>(blocks[3], std::make_integer_sequence<int, Unit::rows[3]>{});
}

template <int... K>
void fill_kinds(Kernels& table, std::integer_sequence<int, K...>) {
  (fill_blocks<static_cast<Kind>(K)>(table.tiles[K]), ...);
}

template <typename T>
void fill_kv(Kernels& table, KvDtype dtype) {
  table.write_kv[static_cast<int>(dtype)] = write_kv<T>;
  table.attend[static_cast<int>(dtype)] = attend<T>;
}

Kernels make_table(const char* name) {
  Kernels table{};
  table.name = name;
  table.quantize = quantize;
  fill_kinds(table, std::make_integer_sequence<int, QUANTIZED_KINDS + FLOAT_KINDS>{});
  if constexpr (Unit::unpacks) {
    constexpr auto rows = std::make_integer_sequence<int, Unit::rows[UNPACKED_BLOCKS - 1]>{};
    fill_unpacked<Kind::U4Zero>(table, rows);
    fill_unpacked<Kind::U4Minimum>(table, rows);
  }
  table.norm = norm;
  table.rope = rope;
  table.gated = gated;
  table.add = add;
  table.softcap = softcap;
  fill_kv<float>(table, KvDtype::F32);
  fill_kv<Half>(table, KvDtype::F16);
  fill_kv<Bfloat>(table, KvDtype::BF16);
  fill_kv<int8_t>(table, KvDtype::Int8);
  table.log_sum_exp = log_sum_exp;
  table.exponentials = exponentials;
  table.dot_loop = dot_loop;
  table.float_loop = float_loop;
  table.read_loop = read_loop;
  return table;
}

}  // namespace
}  // namespace headrace
