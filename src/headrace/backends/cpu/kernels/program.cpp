#include "program.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "denormals.h"

namespace headrace {

// Parts of a step's attention per thread: other threads take over the rest of a late thread's parts.
constexpr int ATTENTION_PARTS = 4;

// A part of a step's attention, one of so many. Rows of one sequence at consecutive positions go together
// as far as attended_rows() allows, in tasks of about the same size; shares are even in positions seen,
// not in rows.
class Program::AttentionShare {
 public:
  AttentionShare(const Step& step, const AttentionShape& shape, int part, int parts)
      : step_(step), shape_(shape), most_(attended_rows(shape.heads / shape.kv_heads)) {
    int64_t all = 0;
    for (int r = 0; r < step.rows; ++r) all += seen(r) * shape.kv_heads;
    from_ = all * part / parts;
    to_ = all * (part + 1) / parts;
  }

  struct Task {
    int row, rows, head;  // the first row, how many, and the KV head
  };

  // Calls do_task(task, the one after it or null) for those whose middle lies in this share.
  template <typename Do>
  void each(Do do_task) const {
    Task last;
    bool any = false;
    visit([&](const Task& task) {
      if (any) do_task(last, &task);
      last = task;
      any = true;
    });
    if (any) do_task(last, static_cast<const Task*>(nullptr));
  }

 private:
  // A head's keys and values are read for all rows of a sequence before the next head's: they stay in
  // the cache.
  template <typename See>
  void visit(See see) const {
    int64_t before = 0;
    for (int first = 0, rows; first < step_.rows; first += rows) {
      rows = rows_in_order(first);
      const int tasks = (rows + most_ - 1) / most_;
      for (int head = 0; head < shape_.kv_heads; ++head)
        for (int task = 0, r = first; task < tasks; ++task) {
          const int end = first + static_cast<int>(static_cast<int64_t>(rows) * (task + 1) / tasks);
          int64_t work = 0;
          for (int i = r; i < end; ++i) work += seen(i);
          const int64_t middle = before + work / 2;
          if (middle >= from_ && middle < to_) see(Task{r, end - r, head});
          before += work;
          r = end;
        }
    }
  }

  int64_t seen(int r) const {
    const int positions = step_.positions[r] + 1;
    return shape_.window > 0 ? std::min(positions, shape_.window) : positions;
  }
  // Rows of one sequence, at consecutive positions.
  int rows_in_order(int r) const {
    int rows = 1;
    while (r + rows < step_.rows && step_.entries[r + rows] == step_.entries[r] &&
           step_.positions[r + rows] == step_.positions[r] + rows)
      ++rows;
    return rows;
  }

  const Step& step_;
  const AttentionShape& shape_;
  int most_;
  int64_t from_, to_;
};

KvPool::KvPool(int blocks, int layers, int kv_heads, int head_dim, KvDtype dtype)
    : blocks(blocks), layers(layers), kv_heads(kv_heads), head_dim(head_dim), dtype(dtype),
      head_bytes(kv_head_bytes(dtype, head_dim)),
      block_bytes(head_bytes * 2 * kv_heads * layers),
      data(block_bytes * blocks, true) {}

void KvPool::copy(int from, int to) {
  if (from != to)
    std::memcpy(data.data() + block_bytes * to, data.data() + block_bytes * from, block_bytes);
}

Program::Program(std::shared_ptr<Pool> pool, std::shared_ptr<KvPool> kv, const Kernels& kernels,
                 int max_rows, int max_wanted, int context)
    : pool_(std::move(pool)), kv_(std::move(kv)), kernels_(kernels), max_rows_(max_rows),
      max_wanted_(max_wanted),
      scores_stride_(static_cast<size_t>(QUERIES_TOGETHER) *
                     ((kv_ ? kv_->head_dim : 0) + context + 2 * BLOCK_TOKENS)),
      scores_(scores_stride_ * 4 * pool_->threads()) {}

int Program::slot(int width, bool head) {
  const size_t rows = head ? max_wanted_ : max_rows_;
  slots_.push_back({width, Buffer(rows * width * sizeof(float))});
  return static_cast<int>(slots_.size()) - 1;
}

void Program::record(const std::string& name, std::function<void(const Extent&)> run,
                     std::function<Cost(const Extent&)> cost) {
  (in_head_ ? head_ : body_)
      .push_back({profile_.operation(name), std::move(run), std::move(cost), {}, name});
}

void Program::record_rows(const std::string& name, std::function<void(const Extent&, int)> one) {
  std::vector<Instruction>& list = in_head_ ? head_ : body_;
  if (!list.empty() && !list.back().row_parts.empty()) {
    Instruction& last = list.back();
    last.row_parts.push_back(std::move(one));
    last.name += ", " + name;
    last.operation = profile_.operation(last.name);
    return;
  }
  record(name, {});
  list.back().row_parts.push_back(std::move(one));
}

void Program::embed(int out, const RawTensor* table, float scale) {
  const size_t bytes = row_bytes(table->format, table->inputs);
  record_rows("embed", [this, out, table, scale, bytes](const Extent& e, int r) {
    float* x = row(out, r);
    decode_floats(table->format, table->data + e.step.tokens[r] * bytes, table->inputs, x);
    if (scale != 1.0f)
      for (int i = 0; i < table->inputs; ++i) x[i] *= scale;
  });
}

void Program::norm(int in, int out, std::vector<float> weight, float eps) {
  record_rows("norm", [this, in, out, weight = std::move(weight), eps](const Extent&, int r) {
    kernels_.norm(row(in, r), weight.data(), eps, static_cast<int>(weight.size()), row(out, r));
  });
}

void Program::linear(int in, int out, const Linear* weight, int added) {
  record_product("", in, out, weight, added, {});
}

void Program::normed_linear(int in, int out, const Linear* weight, int added,
                            std::vector<float> norm, float eps) {
  record_product("norm, ", in, out, weight, added,
                 [this, in, norm = std::move(norm), eps](int r, float* to) {
                   kernels_.norm(row(in, r), norm.data(), eps, slots_[in].width, to);
                 });
}

void Program::gated_linear(int in, int out, const Linear* weight, int added, bool gelu) {
  record_product("gated, ", in, out, weight, added, [this, in, gelu](int r, float* to) {
    kernels_.gated(row(in, r), gelu, slots_[in].width / 2, to);
  });
}

void Program::record_product(const std::string& name, int in, int out, const Linear* weight,
                             int added, std::function<void(int row, float* to)> make) {
  max_inputs_ = std::max(max_inputs_, weight->inputs);
  const auto run = [this, in, out, weight, added, make = std::move(make)](const Extent& e) {
    const float* to_add = added < 0 ? nullptr : row(added, 0);
    const size_t width = slots_[in].width, out_width = slots_[out].width;
    multiply(kernels_, *pool_, *scratch_, *weight,
             {e.rows, row(in, 0), width, make, row(out, 0), out_width, to_add});
  };
  record(name + weight->describe() + (added < 0 ? "" : ", add"), run, [weight](const Extent& e) {
    Cost cost{static_cast<double>(e.rows) * weight->inputs * weight->outputs, 0};
    for (const Linear::Part& part : weight->parts) cost.bytes += part.matrix->bytes();
    return cost;
  });
}

void Program::head_norm(int slot, AttentionShape shape, std::vector<float> q, std::vector<float> k,
                        float eps) {
  // A weight as long as a head norms each head; one as long as all heads norms them together.
  record_rows("head_norm", [this, slot, shape, q = std::move(q), k = std::move(k), eps](const Extent&, int r) {
    float* x = row(slot, r);
    const auto norm_heads = [&](const std::vector<float>& weight, int heads) {
      const int width = static_cast<int>(weight.size());
      for (int done = 0; done < heads * shape.head_dim; done += width, x += width)
        kernels_.norm(x, weight.data(), eps, width, x);
    };
    norm_heads(q, shape.heads);
    norm_heads(k, shape.kv_heads);
  });
}

void Program::rope(int slot, AttentionShape shape, std::vector<float> inv_freq, float scale,
                   bool interleaved) {
  // Layers share a table of cosines and sines, made once a step.
  const auto same = [&](const RopeTable& t) { return t.inv_freq == inv_freq && t.scale == scale; };
  auto found = std::find_if(ropes_.begin(), ropes_.end(), same);
  if (found == ropes_.end()) {
    const size_t bytes = inv_freq.size() * max_rows_ * sizeof(float);
    ropes_.push_back({inv_freq, scale, Buffer(bytes), Buffer(bytes)});
    found = ropes_.end() - 1;
  }
  const size_t table = found - ropes_.begin();
  const int half = static_cast<int>(inv_freq.size());
  record_rows("rope", [this, slot, shape, table, half, interleaved](const Extent&, int r) {
    const float* cosines = ropes_[table].cosines.floats() + static_cast<size_t>(r) * half;
    const float* sines = ropes_[table].sines.floats() + static_cast<size_t>(r) * half;
    float* x = row(slot, r);
    for (int h = 0; h < shape.heads + shape.kv_heads; ++h, x += shape.head_dim)
      kernels_.rope(x, cosines, sines, half, interleaved);
  });
}

void Program::fill_ropes(const Step& step) {
  for (RopeTable& table : ropes_)
    pool_->run(step.rows, [&](const Share& share) {
      const size_t half = table.inv_freq.size();
      for (int r = share.rank; r < step.rows; r += share.members)
        for (size_t i = 0; i < half; ++i) {
          // The angle is rounded to float, as it was when the model was trained.
          const float angle = static_cast<float>(step.positions[r]) * table.inv_freq[i];
          table.cosines.floats()[r * half + i] =
              static_cast<float>(std::cos(static_cast<double>(angle))) * table.scale;
          table.sines.floats()[r * half + i] =
              static_cast<float>(std::sin(static_cast<double>(angle))) * table.scale;
        }
    });
}

void Program::attention(int in, int out, AttentionShape shape) {
  const int dtype = static_cast<int>(kv_->dtype);
  record_rows("write kv", [this, in, shape, dtype](const Extent& e, int r) {
    const int position = e.step.positions[r];
    const int32_t* blocks = e.step.tables + static_cast<size_t>(e.step.entries[r]) * e.step.table_stride;
    uint8_t* block = kv_->data.data() + kv_->block_bytes * blocks[position / BLOCK_TOKENS];
    const float* keys = row(in, r) + shape.heads * shape.head_dim;
    const float* values = keys + shape.kv_heads * shape.head_dim;
    for (int h = 0; h < shape.kv_heads; ++h)
      kernels_.write_kv[dtype](keys + h * shape.head_dim, values + h * shape.head_dim,
                               shape.head_dim, position % BLOCK_TOKENS,
                               block + kv_->key_offset(shape.layer, h),
                               block + kv_->value_offset(shape.layer, h));
  });
  // Instructions follow each other: every key and value of the step is in its block.
  const auto run = [this, in, out, shape, dtype](const Extent& e) {
    scratch_->units().begin();
    pool_->run(e.rows * shape.kv_heads, [&](const Share& share) {
      const int parts = share.members * (e.rows > 1 ? ATTENTION_PARTS : 1);
      scratch_->units().each(share, parts, [&](int part, int) {
        attend(in, out, shape, dtype, e.step, share, AttentionShare(e.step, shape, part, parts));
      });
    });
  };
  record("attention", run, [this, shape](const Extent& e) { return attention_cost(e, shape); });
}

void Program::attend(int in, int out, const AttentionShape& shape, int dtype, const Step& step,
                     const Share& share, const AttentionShare& part) {
  const auto table = [&](int r) {
    return step.tables + static_cast<size_t>(step.entries[r]) * step.table_stride;
  };
  part.each([&](const AttentionShare::Task& task, const AttentionShare::Task* next) {
    const auto [r, rows, head] = task;
    const int group = shape.heads / shape.kv_heads;
    Attend a;
    a.queries = row(in, r) + head * group * shape.head_dim;
    a.out = row(out, r) + head * group * shape.head_dim;
    a.query_stride = slots_[in].width;
    a.out_stride = slots_[out].width;
    a.kv = kv_->data.data();
    a.table = table(r);
    a.block_bytes = kv_->block_bytes;
    a.key_offset = kv_->key_offset(shape.layer, head);
    a.value_offset = kv_->value_offset(shape.layer, head);
    a.rows = rows;
    a.position = step.positions[r];
    a.window = shape.window;
    a.group = group;
    a.head_dim = shape.head_dim;
    a.scale = shape.scale;
    a.softcap = shape.softcap;
    a.scratch = scores_.floats() + share.thread * scores_stride_;
    // A sequence's first rows read blocks that are not in the cache yet; more of its rows find them there.
    const auto is_first = [&](int row) {
      return row == 0 || step.entries[row] != step.entries[row - 1];
    };
    a.is_first = is_first(r);
    a.next_table = nullptr;
    if (next && is_first(next->row)) {
      const int position = step.positions[next->row];
      a.next_table = table(next->row);
      a.next_key_offset = kv_->key_offset(shape.layer, next->head);
      a.next_first = a.first_seen(position) / BLOCK_TOKENS;
      a.next_end = (position + next->rows - 1) / BLOCK_TOKENS + 1;
    }
    kernels_.attend[dtype](a);
    if (share.rank == 0) pool_->advance();  // many rows with long contexts take seconds
  });
}

Cost Program::attention_cost(const Extent& e, const AttentionShape& shape) const {
  double seen = 0;
  for (int r = 0; r < e.rows; ++r) {
    const int positions = e.step.positions[r] + 1;
    seen += shape.window > 0 ? std::min(positions, shape.window) : positions;
  }
  const double token_bytes = 2.0 * kv_->head_bytes * kv_->kv_heads / BLOCK_TOKENS;
  return {seen * shape.heads * shape.head_dim * 2, seen * token_bytes};
}

void Program::gated(int in, int out, bool gelu) {
  record_rows("gated", [this, in, out, gelu](const Extent&, int r) {
    kernels_.gated(row(in, r), gelu, slots_[out].width, row(out, r));
  });
}

void Program::add(int x, int y, int out) {
  record_rows("add", [this, x, y, out](const Extent&, int r) {
    kernels_.add(row(x, r), row(y, r), slots_[out].width, row(out, r));
  });
}

void Program::softcap(int in, int out, float cap) {
  record_rows("softcap", [this, in, out, cap](const Extent&, int r) {
    kernels_.softcap(row(in, r), cap, slots_[out].width, row(out, r));
  });
}

void Program::select(int in, int out) {
  in_head_ = true;
  record_rows("select", [this, in, out](const Extent& e, int r) {
    const int source = e.step.wanted_rows[e.first_wanted + r];
    std::memcpy(row(out, r), row(in, source), sizeof(float) * slots_[out].width);
  });
}

void Program::finish(int logits) {
  logits_ = logits;
  scratch_ = std::make_unique<ProductScratch>(pool_->threads(), max_inputs_);
  if (logits < 0) return;
  record("sample", [this](const Extent& e) { sample(e); });
  for (int t = 0; t < pool_->threads(); ++t) samplers_.emplace_back(kernels_, slot_width(logits));
}

void Program::sample(const Extent& e) {
  const Step& step = e.step;
  pool_->run(e.rows, [&](const Share& share) {
    Sampler& sampler = samplers_[share.thread];
    for (int r = share.rank; r < e.rows; r += share.members) {
      const int i = e.first_wanted + r;
      int32_t token = NOT_NUMBERS;
      if (sampler.read(row(logits_, r)))
        token = step.targets[i] >= 0 ? step.targets[i] : sampler.draw(step.draws[i]);
      step.out_tokens[i] = token;
      step.out_logprobs[i] = token >= 0 ? sampler.logprob(token) : NAN;
      if (step.top_offsets && token >= 0) {
        const int32_t at = step.top_offsets[i];
        sampler.top(step.top_offsets[i + 1] - at, step.out_top_tokens + at,
                    step.out_top_logprobs + at);
      }
    }
  });
}

void Program::run_instruction(const Instruction& instruction, const Extent& e) {
  if (instruction.row_parts.empty()) return instruction.run(e);
  pool_->run(e.rows, [&](const Share& share) {
    for (int r = share.rank; r < e.rows; r += share.members)
      for (const auto& part : instruction.row_parts) part(e, r);
  });
}

void Program::perform(const Instruction& instruction, const Extent& e) {
  pool_->advance();
  if (!profile_.enabled()) return run_instruction(instruction, e);
  const Profile::Clock::time_point began = Profile::Clock::now();
  run_instruction(instruction, e);
  const std::chrono::duration<double> took = Profile::Clock::now() - began;
  profile_.note(instruction.operation, took.count(), pool_->take_worked_s(),
                instruction.cost ? instruction.cost(e) : Cost{});
}

void Program::profile(bool on) {
  profile_.enable(on);
  pool_->time_shares(on);
}

void Program::run(const Step& step) {
  if (!scratch_) throw std::logic_error("Program::run before finish");
  using Clock = std::chrono::steady_clock;
  FlushDenormals flush;
  sample_s_ = 0;
  const Clock::time_point began = Clock::now();
  pool_->advance();
  fill_ropes(step);
  for (const Instruction& instruction : body_) perform(instruction, Extent{step, step.rows, 0});
  // As even as can be: 33 rows are 17 and 16, not 32 and one that reads all weights for itself.
  const int parts = logits_ < 0 ? 0 : (step.wanted + max_wanted_ - 1) / max_wanted_;
  for (int part = 0, first = 0; part < parts; ++part) {
    const int end = static_cast<int>(static_cast<int64_t>(step.wanted) * (part + 1) / parts);
    const Extent extent{step, end - first, first};
    first = end;
    for (const Instruction& instruction : head_) {
      const Clock::time_point before = Clock::now();
      perform(instruction, extent);
      if (&instruction == &head_.back())  // the last instruction draws
        sample_s_ += std::chrono::duration<double>(Clock::now() - before).count();
    }
  }
  run_s_ = std::chrono::duration<double>(Clock::now() - began).count();
}

size_t Program::activation_bytes() const {
  // A sampler's lists when every token of the vocabulary is in them: an adjusted logit, the number
  // of the row it was penalized in, a weight and a candidate each.
  constexpr size_t sampler_token_bytes = 2 * sizeof(float) + sizeof(uint32_t) + sizeof(Candidate);
  size_t total = scores_.bytes() + (scratch_ ? scratch_->bytes() : 0);
  for (const Slot& slot : slots_) total += slot.data.bytes();
  for (const RopeTable& table : ropes_) total += table.cosines.bytes() + table.sines.bytes();
  if (logits_ >= 0) total += samplers_.size() * slots_[logits_].width * sampler_token_bytes;
  return total;
}

}  // namespace headrace
