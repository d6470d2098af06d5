#include "product.h"

#include <algorithm>

namespace headrace {
namespace {

// Quantized rows that are read again and again should stay in the second-level cache.
constexpr size_t SHARED_BYTES = 480 << 10;
// With so few rows each thread quantizes them for itself, which saves waiting for each other.
constexpr int ROWS_QUANTIZED_ALONE = 4;
// Number of row tiles of a panel from which on it is faster to unpack its nibbles once for all.
constexpr int UNPACKING_TILES = 3;
// Rows from which on a matrix unit is faster than tiles in vector registers, also while another
// hyperthread shares the core (docs/decisions/0007).
constexpr int MATRIX_MIN_ROWS = 96;
// How far ahead in its own stream a tile of few rows prefetches weights.
constexpr int STREAM_AHEAD_BYTES = 2048;
constexpr int CACHE_LINE_BYTES = 64;
// The smallest unit of a product of few rows: some tens of microseconds of work.
constexpr size_t UNIT_BYTES = 512 << 10;
// What a matrix unit reads of a tile's 32 inputs, even if it has fewer rows: it reads past the last one.
constexpr size_t MATRIX_BYTES = MATRIX_ROWS * QUANTIZED_GROUP;

int max_tile_rows(const TileKernel (&tiles)[MAX_TILE_ROWS]) {
  int rows = 0;
  while (rows < MAX_TILE_ROWS && tiles[rows]) ++rows;
  return rows;
}

int tile_rows_of(const Kernels& kernels, bool matrix) {
  return matrix ? MATRIX_ROWS : max_tile_rows(kernels.tiles[0][0]);
}

// Rows split into tiles as evenly as can be: 8 is 4 + 4, not 6 + 2.
struct RowTiles {
  int rows, count;
  RowTiles(int rows, int most) : rows(rows), count((rows + most - 1) / most) {}
  int first(int i) const { return static_cast<int>(static_cast<int64_t>(rows) * i / count); }
  int size(int i) const { return first(i + 1) - first(i); }
};

struct Call {
  const Linear& weight;
  const Linear::Part& part;
  const ProductRows& rows;
  int start;  // the chunk's first row
  const uint8_t* quantized;
  uint8_t* unpacked;
  bool matrix;  // on the path's matrix unit
};

size_t weight_bytes(const Linear& weight) {
  size_t bytes = 0;
  for (const Linear::Part& part : weight.parts) bytes += part.matrix->bytes();
  return bytes;
}

// The first block of a unit. Where there are more units than threads, they begin where four streams
// of a tile come out even.
int unit_start(int blocks, int unit, int units, int members) {
  const int start = static_cast<int>(static_cast<int64_t>(blocks) * unit / units);
  return units == members || unit == units ? start : start / MAX_TILE_BLOCKS * MAX_TILE_BLOCKS;
}

void fill_block(const Call& call, int slot, int block, int row, Tile& tile) {
  const Packed& m = *call.part.matrix;
  const int output = block * LANES;
  tile.streams[slot] = m.stream(block);
  tile.bias[slot] = call.weight.bias.empty()
                        ? nullptr
                        : call.weight.bias.data() + call.part.offset + output;
  const size_t at = (call.start + row) * call.rows.out_stride + call.part.offset + output;
  tile.out[slot] = call.rows.out + at;
  tile.added[slot] = call.rows.added ? call.rows.added + at : nullptr;
  tile.lanes[slot] = std::min(LANES, m.outputs - output);
}

// One matrix, some blocks of it at a time.
class Blocks {
 public:
  Blocks(const Kernels& kernels, const Call& call, const RowTiles& tiles)
      : kernels_(kernels), call_(call), tiles_(tiles), m_(*call.part.matrix),
        table_(kernels.tiles[static_cast<int>(m_.kind)]) {}

  void run(int first, int last) const {
    int b = first;
    if (call_.matrix) {
      for (; b < last; ++b) matrix_block(b, b + 1);
      return;
    }
    if (tiles_.count == 1 && table_[3][tiles_.rows - 1]) {
      // Bound by memory: four distant streams use more of its bandwidth than one.
      const int quarter = (last - first) / 4;
      for (int i = 0; i < quarter; ++i) {
        Tile tile = make(0, 4, {b + i, b + quarter + i, b + 2 * quarter + i, b + 3 * quarter + i});
        for (int s = 0; s < 4; ++s) tile.ahead[s] = tile.streams[s] + STREAM_AHEAD_BYTES;
        tile.ahead_lines = record_lines();
        table_[3][tiles_.rows - 1](tile);
      }
      b += 4 * quarter;
    }
    for (int blocks; b < last; b += blocks) {
      blocks = b + 1 < last && table_[1][0] ? 2 : 1;
      panel(b, blocks, b + blocks);
    }
  }

  // One panel, of two blocks if it has a second; the one that begins with block `next` comes after it.
  void run_panel(int b, int next) const {
    const int blocks = std::min(2, m_.blocks - b);
    if (call_.matrix) {
      matrix_block(b, blocks == 2 ? b + 1 : next);
      if (blocks == 2) matrix_block(b + 1, next);
      return;
    }
    if (blocks == 1 || table_[1][0]) return panel(b, blocks, next);
    panel(b, 1, b + 1);
    panel(b + 1, 1, next);
  }

 private:
  void matrix_block(int b, int next) const {
    const int kind = static_cast<int>(m_.kind);
    kernels_.matrix.unpack[kind](m_.stream(b), m_.records, m_.zero, call_.unpacked);
    for (int i = 0; i < tiles_.count; ++i) {
      Tile tile = make(i, 1, {b});
      look_ahead(tile, i, next, 1);
      kernels_.matrix.tiles[kind][tiles_.size(i) - 1](tile);
    }
  }

  void panel(int b, int blocks, int next) const {
    for (int i = 0; i < tiles_.count; ++i) {
      Tile tile = make(i, blocks, {b, b + 1});
      look_ahead(tile, i, next, blocks);
      kernel(i, blocks)(tile);
    }
  }

  Tile make(int i, int blocks, const int (&block)[MAX_TILE_BLOCKS]) const {
    const int row = tiles_.first(i);
    Tile tile;
    tile.ahead_lines = 0;
    tile.unpacked = call_.unpacked;
    tile.inputs = m_.inputs;
    tile.records = m_.records;
    tile.zero = m_.zero;
    tile.out_stride = call_.rows.out_stride;
    tile.rows = call_.quantized + row * quantized_row_bytes(m_.inputs);
    tile.floats = call_.rows.x + (call_.start + row) * call_.rows.x_stride;
    tile.floats_stride = call_.rows.x_stride;
    for (int b = 0; b < blocks; ++b) fill_block(call_, b, block[b], row, tile);
    return tile;
  }

  // Each row tile prefetches its part of the next blocks.
  void look_ahead(Tile& tile, int i, int next, int blocks) const {
    if (!is_quantized(m_.kind)) return;
    tile.ahead_lines = (record_lines() + tiles_.count - 1) / tiles_.count;
    if (i * tile.ahead_lines >= record_lines()) tile.ahead_lines = 0;
    for (int s = 0; s < blocks; ++s)
      tile.ahead[s] = m_.stream(std::clamp(next + s, 0, m_.blocks - 1)) +
                      static_cast<size_t>(i) * tile.ahead_lines * m_.records * CACHE_LINE_BYTES;
  }

  int record_lines() const {
    return static_cast<int>(m_.stream_bytes / m_.records / CACHE_LINE_BYTES);
  }
  TileKernel kernel(int i, int blocks) const {
    const int kind = static_cast<int>(m_.kind), rows = tiles_.size(i);
    if (kind < FOUR_BIT_KINDS && blocks == UNPACKED_BLOCKS && tiles_.count >= UNPACKING_TILES)
      if (const TileKernel tile = (i == 0 ? kernels_.unpacking : kernels_.unpacked)[kind][rows - 1])
        return tile;
    return table_[blocks - 1][rows - 1];
  }

  const Kernels& kernels_;
  const Call& call_;
  const RowTiles& tiles_;
  const Packed& m_;
  const TileKernel (&table_)[MAX_TILE_BLOCKS][MAX_TILE_ROWS];
};

}  // namespace

bool Linear::quantized() const {
  return std::any_of(parts.begin(), parts.end(),
                     [](const Part& p) { return is_quantized(p.matrix->kind); });
}

bool Linear::quantized_wholly() const {
  return std::all_of(parts.begin(), parts.end(),
                     [](const Part& p) { return is_quantized(p.matrix->kind); });
}

std::string Linear::describe() const {
  std::string text = "linear " + std::to_string(inputs) + " x " + std::to_string(outputs);
  for (size_t i = 0; i < parts.size(); ++i)
    if (i == 0 || parts[i].matrix->kind != parts[i - 1].matrix->kind)
      text += std::string(i == 0 ? " " : "+") + kind_name(parts[i].matrix->kind);
  return text;
}

ProductScratch::ProductScratch(int threads, int max_inputs)
    : quantized_bytes_((quantized_row_bytes(max_inputs) * MAX_TILE_ROWS + 63) / 64 * 64),
      unpacked_at_(quantized_bytes_ + sizeof(float) * padded_inputs(max_inputs) * MATRIX_ROWS),
      own_bytes_(unpacked_at_ + unpacked_bytes(max_inputs)),
      shared_(std::max(SHARED_BYTES, quantized_row_bytes(max_inputs) * MATRIX_ROWS) + MATRIX_BYTES),
      own_(own_bytes_ * threads),
      units_(threads) {}

void multiply(const Kernels& kernels, Pool& pool, const ProductScratch& scratch,
              const Linear& weight, const ProductRows& rows) {
  const bool matrix =
      kernels.matrix.begin && rows.rows >= MATRIX_MIN_ROWS && weight.quantized_wholly();
  const int most = tile_rows_of(kernels, matrix);
  const size_t row_bytes = quantized_row_bytes(weight.inputs);
  const int chunk_rows = std::max<int>(most, static_cast<int>(SHARED_BYTES / row_bytes) / most * most);
  const bool quantized = weight.quantized();
  const bool alone = rows.rows <= std::min(ROWS_QUANTIZED_ALONE, most);
  int least_blocks = weight.parts[0].matrix->blocks;
  for (const Linear::Part& part : weight.parts)
    least_blocks = std::min(least_blocks, part.matrix->blocks);

  for (int start = 0; start < rows.rows; start += chunk_rows) {
    pool.advance();
    const RowTiles tiles(std::min(chunk_rows, rows.rows - start), most);
    const auto quantize = [&](int i, int thread, uint8_t* area) {
      const int first = start + tiles.first(i);
      const float* x = rows.x + first * rows.x_stride;
      size_t stride = rows.x_stride;
      if (rows.make) {
        x = scratch.made(thread);
        stride = padded_inputs(weight.inputs);
        for (int r = 0; r < tiles.size(i); ++r)
          rows.make(first + r, scratch.made(thread) + r * stride);
      }
      kernels.quantize(x, stride, tiles.size(i), weight.inputs, area + tiles.first(i) * row_bytes);
    };
    if (quantized && !alone)
      pool.run(tiles.count, [&](const Share& share) {
        for (int i = share.rank; i < tiles.count; i += share.members)
          quantize(i, share.thread, scratch.shared());
      });
    scratch.units().begin();
    pool.run(pool.threads(), [&](const Share& share) {
      uint8_t* area = alone ? scratch.own(share.thread) : scratch.shared();
      if (quantized && alone)
        for (int i = 0; i < tiles.count; ++i) quantize(i, share.thread, area);
      if (matrix) kernels.matrix.begin();
      const auto call = [&](const Linear::Part& part) {
        return Call{weight, part, rows, start, area, scratch.unpacked(share.thread), matrix};
      };
      if (tiles.count > 1 && weight.parts.size() == 1) {
        const Call one = call(weight.parts[0]);
        const Blocks blocks(kernels, one, tiles);
        scratch.units().each(share, (least_blocks + 1) / 2, [&](int panel, int direction) {
          blocks.run_panel(2 * panel, 2 * (panel + direction));
        });
      } else {
        // Few rows are bound by memory, which is fastest in long runs; a unit has a part of every matrix.
        const int pieces = tiles.count > 1
                               ? least_blocks / 2
                               : static_cast<int>(weight_bytes(weight) / UNIT_BYTES);
        const int units = share.members * std::max(1, std::min(pieces, least_blocks) / share.members);
        scratch.units().each(share, units, [&](int unit, int) {
          for (const Linear::Part& part : weight.parts) {
            const Call one = call(part);
            const int blocks = part.matrix->blocks;
            Blocks(kernels, one, tiles)
                .run(unit_start(blocks, unit, units, share.members),
                     unit_start(blocks, unit + 1, units, share.members));
          }
        });
      }
      if (matrix) kernels.matrix.end();
    });
  }
}

}  // namespace headrace
