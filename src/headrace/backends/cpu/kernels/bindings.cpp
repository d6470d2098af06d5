// The native module's Python interface: packed weights, a pool of KV blocks, and programs.
//
// Arguments are checked here; behind this file everything is trusted. The GIL is released wherever
// real work is done.
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <limits>

#include "arrays.h"
#include "columns.h"
#include "peaks.h"
#include "program.h"

using namespace nanobind::literals;

namespace headrace {
namespace {

std::vector<float> to_vector(const FloatArray& a) { return {a.data(), a.data() + a.size()}; }

// A tensor in the mapped file; holds the array, and through it the map.
struct Table {
  Bytes bytes;
  RawTensor raw;

  Table(const std::string& format, int rows, int columns, Bytes data)
      : bytes(std::move(data)), raw{format_named(format.c_str()), rows, columns, bytes.data()} {
    require(rows > 0 && columns > 0, "a tensor has no rows or no columns");
    require(columns % facts(raw.format).block_values == 0, "a row does not hold whole blocks");
    require(bytes.size() == row_bytes(raw.format, columns) * static_cast<size_t>(rows),
            "a tensor's bytes do not match its shape");
  }
};

// A linear weight and the matrices it owns.
struct Matrix {
  std::vector<std::unique_ptr<Packed>> owned;
  Linear linear;

  Matrix(const Matrix&) = delete;
  // Neighbouring tensors of one format become one matrix where no block would straddle them.
  Matrix(const std::vector<Table*>& parts, std::optional<FloatArray> bias, int threads) {
    require(!parts.empty(), "a matrix has no parts");
    linear.inputs = parts[0]->raw.inputs;
    nb::gil_scoped_release release;
    for (size_t i = 0; i < parts.size();) {
      std::vector<RawTensor> run{parts[i]->raw};
      int outputs = parts[i]->raw.outputs;
      for (++i; i < parts.size() && parts[i]->raw.format == run[0].format && outputs % LANES == 0;
           ++i) {
        run.push_back(parts[i]->raw);
        outputs += parts[i]->raw.outputs;
      }
      require(run[0].inputs == linear.inputs, "parts of a matrix differ in width");
      owned.push_back(std::make_unique<Packed>(pack(run, threads)));
      linear.parts.push_back({owned.back().get(), linear.outputs});
      linear.outputs += outputs;
    }
    if (bias) {
      require(static_cast<int>(bias->size()) == linear.outputs, "a bias does not match its matrix");
      linear.bias = to_vector(*bias);
    }
  }

  size_t bytes() const {
    size_t total = linear.bias.size() * sizeof(float);
    for (const auto& m : owned) total += m->bytes();
    return total;
  }
};

KvDtype kv_dtype_named(const std::string& name) {
  if (name == "f32") return KvDtype::F32;
  if (name == "f16") return KvDtype::F16;
  if (name == "bf16") return KvDtype::BF16;
  if (name == "int8") return KvDtype::Int8;
  throw std::invalid_argument("unknown KV dtype: " + name);
}

// Pairs (from, to), one after the other; all are checked before the first block changes.
void copy_blocks(KvPool& kv, IntMatrix pairs) {
  require(pairs.shape(1) == 2, "a block copy is a pair");
  for (size_t i = 0; i < pairs.size(); ++i)
    require(pairs.data()[i] >= 0 && pairs.data()[i] < kv.blocks,
            "a block copy names a block outside the pool");
  nb::gil_scoped_release release;
  for (size_t i = 0; i < pairs.size(); i += 2) kv.copy(pairs.data()[i], pairs.data()[i + 1]);
}

// One block's bytes, out of the pool and into it.
void read_block(const KvPool& kv, int block, BytesOut out) {
  require(block >= 0 && block < kv.blocks, "a block to read is outside the pool");
  require(out.size() == kv.block_bytes, "a block has another size than the array for it");
  nb::gil_scoped_release release;
  std::memcpy(out.data(), kv.data.data() + kv.block_bytes * block, kv.block_bytes);
}

void write_block(KvPool& kv, int block, Bytes bytes) {
  require(block >= 0 && block < kv.blocks, "a block to write is outside the pool");
  require(bytes.size() == kv.block_bytes, "a block has another size than what is put into it");
  nb::gil_scoped_release release;
  std::memcpy(kv.data.data() + kv.block_bytes * block, bytes.data(), kv.block_bytes);
}

const Kernels& path_named(const std::optional<std::string>& name) {
  if (!name) return best_path();
  const Kernels* path = find_path(name->c_str());
  if (!path) throw std::invalid_argument("this machine can't run the path " + *name);
  return *path;
}

AttentionShape shape_of(const Program& program, int slot, int layer, int heads, int kv_heads,
                        int head_dim, float scale, float softcap, int window) {
  require(heads > 0 && kv_heads > 0 && head_dim > 0 && heads % kv_heads == 0,
          "heads and kv_heads do not fit together");
  require(program.slot_width(slot) == (heads + 2 * kv_heads) * head_dim,
          "a qkv row has the wrong width");
  return {layer, heads, kv_heads, head_dim, scale, softcap, window};
}

// A program and its KV pool. Its weights are kept alive by keep_alive below.
struct RecordedProgram {
  Program program;
  std::shared_ptr<KvPool> kv;
  int vocabulary = 0;

  RecordedProgram(const RecordedProgram&) = delete;
  RecordedProgram(std::shared_ptr<Pool> pool, std::shared_ptr<KvPool> kv, int max_rows,
                  int max_wanted, int context, const std::optional<std::string>& path)
      : program(std::move(pool), kv, path_named(path), max_rows, max_wanted, context), kv(kv) {}

  Answers run(Ints tokens, const Ints& counts, const Ints& starts, const std::vector<Ints>& tables,
              const std::vector<std::optional<Filters>>& draws, const std::vector<double>& uniforms,
              const std::vector<Asked>& asked, const Adjustments* adjustments,
              const std::vector<Drafted>& drafted) {
    require(!tokens.empty() && tokens.size() <= static_cast<size_t>(program.max_rows()),
            "a step has no rows, or more than its buffers");
    StepColumns columns(std::move(tokens), counts, starts, tables, draws, uniforms, asked,
                        adjustments, drafted, program.vocabulary());
    columns.check(vocabulary, kv ? kv->blocks : std::numeric_limits<int>::max());
    {
      nb::gil_scoped_release release;
      program.run(columns.step());
    }
    return columns.take_answers();
  }

  // (operation, calls, seconds, seconds worked by all threads, multiply-adds, bytes)
  using Timed = std::tuple<std::string, int64_t, double, double, double, double>;
  std::vector<Timed> take_profile() {
    std::vector<Timed> times;
    for (const OperationTime& t : program.take_profile())
      times.emplace_back(t.name, t.calls, t.seconds, t.worked_s, t.cost.multiplies, t.cost.bytes);
    return times;
  }

  auto read(int slot, int rows) {
    require(program.holds(slot, rows), "no such slot, or not so many rows in it");
    const size_t shape[2] = {static_cast<size_t>(rows),
                             static_cast<size_t>(program.slot_width(slot))};
    return nb::ndarray<nb::numpy, float, nb::ndim<2>>(program.slot_data(slot), 2, shape,
                                                      nb::handle());
  }
};

void check_product(const Program& program, const Matrix& w, int inputs, int out, int added) {
  require(w.linear.inputs == inputs && w.linear.outputs == program.slot_width(out) &&
              (added < 0 || program.slot_width(added) == w.linear.outputs),
          "linear: wrong width");
}

void bind_program(nb::module_& m) {
  using P = RecordedProgram;
  nb::class_<P>(m, "Program")
      .def(nb::init<std::shared_ptr<Pool>, std::shared_ptr<KvPool>, int, int, int,
                    const std::optional<std::string>&>(),
           "pool"_a, "kv"_a.none(), "max_rows"_a, "max_wanted"_a, "context"_a, "path"_a.none())
      .def("slot", [](P& p, int width, bool head) { return p.program.slot(width, head); },
           "width"_a, "head"_a = false)
      .def_prop_ro("progress", [](const P& p) { return p.program.progress(); })
      .def_prop_ro("sample_s", [](const P& p) { return p.program.sample_s(); })
      .def_prop_ro("run_s", [](const P& p) { return p.program.run_s(); })
      .def_prop_ro("activation_bytes", [](const P& p) { return p.program.activation_bytes(); })
      .def("embed",
           [](P& p, int out, const Table& t, float scale) {
             require(p.program.slot_width(out) == t.raw.inputs, "embed: wrong width");
             p.vocabulary = t.raw.outputs;
             p.program.embed(out, &t.raw, scale);
           },
           nb::keep_alive<1, 3>())
      .def("norm",
           [](P& p, int in, int out, FloatArray weight, float eps) {
             require(static_cast<int>(weight.size()) == p.program.slot_width(in) &&
                         p.program.slot_width(in) == p.program.slot_width(out),
                     "norm: wrong width");
             p.program.norm(in, out, to_vector(weight), eps);
           })
      .def("linear",
           [](P& p, int in, int out, const Matrix& w, int added) {
             check_product(p.program, w, p.program.slot_width(in), out, added);
             p.program.linear(in, out, &w.linear, added);
           },
           nb::keep_alive<1, 4>())
      .def("normed_linear",
           [](P& p, int in, int out, const Matrix& w, int added, FloatArray norm, float eps) {
             check_product(p.program, w, p.program.slot_width(in), out, added);
             require(w.linear.quantized_wholly() &&
                         static_cast<int>(norm.size()) == p.program.slot_width(in),
                     "normed_linear: wrong width, or a weight of floats");
             p.program.normed_linear(in, out, &w.linear, added, to_vector(norm), eps);
           },
           nb::keep_alive<1, 4>())
      .def("gated_linear",
           [](P& p, int in, int out, const Matrix& w, int added, bool gelu) {
             check_product(p.program, w, p.program.slot_width(in) / 2, out, added);
             require(w.linear.quantized_wholly(), "gated_linear: a weight of floats");
             p.program.gated_linear(in, out, &w.linear, added, gelu);
           },
           nb::keep_alive<1, 4>())
      .def("head_norm",
           [](P& p, int slot, int heads, int kv_heads, int head_dim, FloatArray q, FloatArray k,
              float eps) {
             const int q_size = static_cast<int>(q.size()), k_size = static_cast<int>(k.size());
             require((q_size == head_dim && k_size == head_dim) ||
                         (q_size == heads * head_dim && k_size == kv_heads * head_dim),
                     "head_norm: wrong width");
             p.program.head_norm(
                 slot, shape_of(p.program, slot, 0, heads, kv_heads, head_dim, 1, 0, 0),
                 to_vector(q), to_vector(k), eps);
           })
      .def("rope",
           [](P& p, int slot, int heads, int kv_heads, int head_dim, FloatArray inv_freq,
              float scale, bool interleaved) {
             require(static_cast<int>(inv_freq.size()) * 2 <= head_dim, "rope: wrong width");
             p.program.rope(slot,
                            shape_of(p.program, slot, 0, heads, kv_heads, head_dim, 1, 0, 0),
                            to_vector(inv_freq), scale, interleaved);
           })
      .def("attention",
           [](P& p, int in, int out, int layer, int heads, int kv_heads, int head_dim, float scale,
              float softcap, int window) {
             require(p.kv && layer >= 0 && layer < p.kv->layers && kv_heads == p.kv->kv_heads &&
                         head_dim == p.kv->head_dim &&
                         p.program.slot_width(out) == heads * head_dim,
                     "attention: does not match the KV pool");
             p.program.attention(in, out,
                                 shape_of(p.program, in, layer, heads, kv_heads, head_dim, scale,
                                          softcap, window));
           })
      .def("gated",
           [](P& p, int in, int out, bool gelu) {
             require(p.program.slot_width(in) == 2 * p.program.slot_width(out),
                     "gated: wrong width");
             p.program.gated(in, out, gelu);
           })
      .def("add", [](P& p, int x, int y, int out) { p.program.add(x, y, out); })
      .def("softcap", [](P& p, int in, int out, float cap) { p.program.softcap(in, out, cap); })
      .def("select", [](P& p, int in, int out) { p.program.select(in, out); })
      .def("finish", [](P& p, int logits) { p.program.finish(logits); }, "logits"_a = -1)
      .def("run", &P::run, "tokens"_a, "counts"_a, "starts"_a, "tables"_a, "draws"_a, "uniforms"_a,
           "asked"_a = std::vector<Asked>(), "adjustments"_a.none() = nb::none(),
           "drafted"_a = std::vector<Drafted>())
      .def("profile", [](P& p, bool on) { p.program.profile(on); }, "on"_a)
      .def("take_profile", &P::take_profile)
      .def("slot_view", &P::read, nb::rv_policy::reference_internal, "slot"_a, "rows"_a);
}

}  // namespace

NB_MODULE(_native, m) {
  nb::class_<Pool>(m, "Pool")
      .def(nb::new_([](int threads) { return std::make_shared<Pool>(threads); }), "threads"_a)
      .def_prop_ro("threads", &Pool::threads)
      .def("take_mean_members", &Pool::take_mean_members);
  nb::class_<Attendance>(m, "Attendance")
      .def(nb::init<>())
      .def("late", &Attendance::late, "now"_a, "waited"_a, "members"_a)
      .def("returns", &Attendance::returns, "now"_a, "members"_a)
      .def_prop_ro("out", &Attendance::out);
  nb::class_<KvPool>(m, "KvPool")
      .def(nb::new_([](int blocks, int layers, int kv_heads, int head_dim, const std::string& dtype) {
             require(blocks > 0 && layers > 0 && kv_heads > 0 && head_dim > 0,
                     "a KV pool has a dimension of 0");
             return std::make_shared<KvPool>(blocks, layers, kv_heads, head_dim,
                                             kv_dtype_named(dtype));
           }),
           "blocks"_a, "layers"_a, "kv_heads"_a, "head_dim"_a, "dtype"_a)
      .def("copy", &copy_blocks, "pairs"_a)
      .def("read", &read_block, "block"_a, "out"_a)
      .def("write", &write_block, "block"_a, "bytes"_a)
      .def_prop_ro("block_bytes", [](const KvPool& kv) { return kv.block_bytes; })
      .def_prop_ro("bytes", [](const KvPool& kv) { return kv.data.bytes(); });
  nb::class_<Table>(m, "Table")
      .def(nb::init<const std::string&, int, int, Bytes>(), "format"_a, "rows"_a, "columns"_a,
           "data"_a)
      .def_prop_ro("columns", [](const Table& t) { return t.raw.inputs; });
  nb::class_<Matrix>(m, "Matrix")
      .def(nb::init<const std::vector<Table*>&, std::optional<FloatArray>, int>(), "parts"_a,
           "bias"_a.none(), "threads"_a)
      .def_prop_ro("outputs", [](const Matrix& w) { return w.linear.outputs; })
      .def_prop_ro("quantized", [](const Matrix& w) { return w.linear.quantized_wholly(); })
      .def_prop_ro("bytes", &Matrix::bytes);
  nb::class_<Adjustments>(m, "Adjustments")
      .def(nb::init<IntArray, FloatMatrix, IntArray, Adjustments::Valued, Adjustments::Ids,
                    Adjustments::Ids, Adjustments::Ids, Adjustments::Valued, Adjustments::Masks,
                    std::optional<IntArray>>(),
           "rows"_a, "penalties"_a, "limited"_a, "bias"_a, "allowed"_a, "banned"_a, "seen"_a,
           "counts"_a, "masks"_a, "places"_a.none() = nb::none());
  bind_program(m);
  m.def(
      "measure_peaks",
      [](Pool& pool, size_t read_bytes, const std::optional<std::string>& path) {
        require(read_bytes >= (1 << 20), "too few bytes to measure reading");
        const Kernels& kernels = path_named(path);
        nb::gil_scoped_release release;
        const Peaks peaks = measure_peaks(kernels, pool, read_bytes);
        return std::make_tuple(peaks.dots, peaks.floats, peaks.bytes);
      },
      "pool"_a, "read_bytes"_a, "path"_a.none() = nb::none());
  m.def("paths", [] {
    std::vector<std::string> names;
    for (int i = 0; i < path_count(); ++i) names.emplace_back(path_at(i).name);
    return names;
  });
}

}  // namespace headrace
