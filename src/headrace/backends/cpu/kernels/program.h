// A decoder recorded as a list of instructions, and replayed for each step, each by all threads.
//
// Python records it once (backends/cpu/ops.py); a step then crosses into C++ once. Instructions
// before `select` run over all rows of the step (the body); those after it run over the rows whose
// logits are wanted, a few at a time, each followed by sampling (the head): logits of a long prompt
// never exist all at once.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "kernels.h"
#include "pool.h"
#include "product.h"
#include "profile.h"
#include "sampling.h"

namespace headrace {

// The pool of KV blocks. A block holds 16 tokens of every layer:
//   [layer][keys: [kv_head][head_dim][16], values: [kv_head][16][head_dim]]
// with int8, float scales [16] after each head's keys and after its values.
struct KvPool {
  KvPool(int blocks, int layers, int kv_heads, int head_dim, KvDtype dtype);

  // Copies a whole block over another. The caller checks both numbers.
  void copy(int from, int to);

  int blocks, layers, kv_heads, head_dim;
  KvDtype dtype;
  size_t head_bytes;   // 16 tokens of one head's keys, or values
  size_t block_bytes;
  Buffer data;

  size_t key_offset(int layer, int head) const {
    return (static_cast<size_t>(layer) * 2 * kv_heads + head) * head_bytes;
  }
  size_t value_offset(int layer, int head) const {
    return key_offset(layer, head) + kv_heads * head_bytes;
  }
};

struct AttentionShape {
  int layer, heads, kv_heads, head_dim;
  float scale;
  float softcap;  // 0: none
  int window;     // 0: none
};

// One step's inputs: plain arrays, checked by the caller.
struct Step {
  int rows;
  const int32_t* tokens;     // [rows]
  const int32_t* positions;  // [rows]
  const int32_t* entries;    // [rows]: whose block table
  const int32_t* tables;     // [entries][table_stride]
  int table_stride;
  int wanted;                    // rows whose logits are wanted
  const int32_t* wanted_rows;    // [wanted]
  const int32_t* targets;        // [wanted]: score this token, or -1: draw one
  const DrawParams* draws;       // [wanted]
  int32_t* out_tokens;           // [wanted]; a Failure where nothing could be drawn or scored
  float* out_logprobs;           // [wanted]
  // The likeliest tokens of wanted row i, at top_offsets[i] to top_offsets[i + 1]; or null: none.
  const int32_t* top_offsets;
  int32_t* out_top_tokens;
  float* out_top_logprobs;
};

class Program {
 public:
  Program(std::shared_ptr<Pool> pool, std::shared_ptr<KvPool> kv, const Kernels& kernels,
          int max_rows, int max_wanted, int context);

  // A row buffer of `width` floats; `head` ones hold only as many rows as the head runs at a time.
  int slot(int width, bool head);
  float* slot_data(int slot) { return slots_[slot].data.floats(); }
  bool holds(int slot, int rows) const {
    return slot >= 0 && slot < static_cast<int>(slots_.size()) && rows >= 0 &&
           static_cast<size_t>(rows) * slots_[slot].width * sizeof(float) <= slots_[slot].data.bytes();
  }
  int slot_width(int slot) const { return slots_[slot].width; }
  int max_rows() const { return max_rows_; }
  int vocabulary() const { return logits_ < 0 ? 0 : slot_width(logits_); }

  // Recording: each appends one instruction. Weights must outlive the program.
  void embed(int out, const RawTensor* table, float scale);
  void norm(int in, int out, std::vector<float> weight, float eps);
  // `added` is the slot of what the product is added to, or -1; it may be `out` itself.
  void linear(int in, int out, const Linear* weight, int added);
  // The same over the norm of `in`, or over its gate and up: their rows exist only while they are
  // being quantized. The weight must be quantized wholly.
  void normed_linear(int in, int out, const Linear* weight, int added, std::vector<float> norm,
                     float eps);
  void gated_linear(int in, int out, const Linear* weight, int added, bool gelu);
  void head_norm(int slot, AttentionShape shape, std::vector<float> q, std::vector<float> k,
                 float eps);
  void rope(int slot, AttentionShape shape, std::vector<float> inv_freq, float scale,
            bool interleaved);
  void attention(int in, int out, AttentionShape shape);
  void gated(int in, int out, bool gelu);
  void add(int x, int y, int out);
  void softcap(int in, int out, float cap);
  void select(int in, int out);
  void finish(int logits);  // the slot to sample from

  void run(const Step& step);

  // Any thread may read it while a step runs: as long as it moves, work is being done.
  uint64_t progress() const { return pool_->progress(); }
  // The time that drawing took, of the last step. Not to be read while one runs.
  double sample_s() const { return sample_s_; }
  // What the last step took here: all the rest of it is its caller's.
  double run_s() const { return run_s_; }
  // The threads that worked together, on average since the last time.

  // Time each operation of the steps to come, or no longer; and what was noted since the last time.
  void profile(bool on);
  std::vector<OperationTime> take_profile() { return profile_.take(); }

  // What the program holds besides weights and KV blocks, once it is finished: slots, rope tables,
  // scratch, and the samplers' lists at their longest. backends/cpu/layout.py predicts it.
  size_t activation_bytes() const;

 private:
  // What an instruction needs to know when it runs.
  struct Extent {
    const Step& step;
    int rows;          // to be processed
    int first_wanted;  // head only: index of the first of them among the wanted rows
  };
  class AttentionShare;
  struct Instruction {
    int operation;  // its number in the profile
    std::function<void(const Extent&)> run;
    std::function<Cost(const Extent&)> cost;  // asked only while profiling; may be empty
    // Instead of run: what is done to a row at a time, one after the other.
    std::vector<std::function<void(const Extent&, int row)>> row_parts;
    std::string name;
  };
  struct Slot {
    int width;
    Buffer data;
  };
  struct RopeTable {
    std::vector<float> inv_freq;
    float scale;
    Buffer cosines, sines;  // [max_rows][half]
  };

  Cost attention_cost(const Extent& e, const AttentionShape& shape) const;
  void attend(int in, int out, const AttentionShape& shape, int dtype, const Step& step,
              const Share& share, const AttentionShare& part);
  void fill_ropes(const Step& step);
  void sample(const Extent& e);
  void record_product(const std::string& name, int in, int out, const Linear* weight, int added,
                      std::function<void(int row, float* to)> make);
  void run_instruction(const Instruction& instruction, const Extent& e);
  void perform(const Instruction& instruction, const Extent& e);
  void record(const std::string& name, std::function<void(const Extent&)> run,
              std::function<Cost(const Extent&)> cost = {});
  float* row(int slot, int r) {
    return slots_[slot].data.floats() + static_cast<size_t>(r) * slots_[slot].width;
  }
  // Appends an instruction that handles one row at a time, and that row only. Those in a row become
  // one instruction: a thread goes on with its rows without waiting for the others.
  void record_rows(const std::string& name, std::function<void(const Extent&, int row)> one);

  std::shared_ptr<Pool> pool_;
  std::shared_ptr<KvPool> kv_;
  const Kernels& kernels_;
  const int max_rows_, max_wanted_;
  const size_t scores_stride_;  // floats of attention scratch per thread
  Buffer scores_;
  std::vector<Slot> slots_;
  std::vector<RopeTable> ropes_;
  std::vector<Instruction> body_, head_;
  Profile profile_;
  std::vector<Sampler> samplers_;  // one per thread
  std::unique_ptr<ProductScratch> scratch_;
  int max_inputs_ = 0;
  int logits_ = -1;
  bool in_head_ = false;
  double sample_s_ = 0, run_s_ = 0;
};

}  // namespace headrace
