// A step as Python passes it: a plan's columns (core/step.py), checked, and laid out as the program
// reads it. Behind this everything is trusted.
#pragma once

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "adjustments.h"
#include "program.h"

namespace headrace {

using Ints = std::vector<int32_t>;

// What only few sequences ask for: a row of the plan, tokens to be scored (none, or one for each of its
// tokens), and how many of the likeliest tokens to return with each answer.
using Asked = std::tuple<int, Ints, int>;

// A row of the plan whose last tokens are drafts, as many as there are numbers: those of the draws after
// each draft.
using Drafted = std::tuple<int, std::vector<double>>;

// For each wanted row, in order: a token or a Failure, its log-probability, and the likeliest tokens
// with theirs (empty if no row asks for them). Wanted rows are a sequence's targets, then its draws.
using Tops = std::vector<std::vector<std::pair<int32_t, float>>>;
using Answers = std::tuple<Ints, std::vector<float>, Tops>;

class StepColumns {
 public:
  // `draws` has the filters of a token to be drawn after a sequence's last one that is not a draft (and
  // after each draft), or nothing.
  StepColumns(Ints tokens, const Ints& counts, const Ints& starts, const std::vector<Ints>& tables,
              const std::vector<std::optional<Filters>>& draws, const std::vector<double>& uniforms,
              const std::vector<Asked>& asked, const Adjustments* adjustments,
              const std::vector<Drafted>& drafted, int vocabulary)
      : tokens_(std::move(tokens)) {
    const size_t sequences = counts.size();
    require(starts.size() == sequences && tables.size() == sequences &&
                draws.size() == sequences && uniforms.size() == sequences,
            "columns of a step differ in length");
    lay_tables(tables);
    auto extra = asked.begin();
    auto guessed = drafted.begin();
    Ints drawn(sequences, -1), places(sequences, 0);  // the wanted row of each first draw; how many
    for (size_t i = 0; i < sequences; ++i) {
      require(counts[i] > 0 && starts[i] >= 0, "a sequence has no tokens, or a negative position");
      require(static_cast<int64_t>(starts[i]) + counts[i] <=
                  static_cast<int64_t>(tables[i].size()) * LANES,
              "a position lies beyond its block table");
      const int first = static_cast<int>(positions_.size());
      for (int32_t t = 0; t < counts[i]; ++t) positions_.push_back(starts[i] + t);
      owners_.insert(owners_.end(), counts[i], static_cast<int32_t>(i));
      int tops = 0;
      if (extra != asked.end() && std::get<0>(*extra) == static_cast<int>(i)) {
        tops = std::get<2>(*extra);
        want_targets(std::get<1>(*extra), first, counts[i], tops, vocabulary);
        ++extra;
      }
      if (!draws[i]) continue;
      drawn[i] = static_cast<int32_t>(wanted_.size());
      places[i] = 1;
      int last = first + counts[i] - 1;  // that is not a draft
      const std::vector<double>* after = nullptr;
      if (guessed != drafted.end() && std::get<0>(*guessed) == static_cast<int>(i)) {
        after = &std::get<1>(*guessed++);
        require(after->size() < static_cast<size_t>(counts[i]), "a sequence has only drafts");
        places[i] += static_cast<int32_t>(after->size());
        last -= static_cast<int>(after->size());
      }
      want(last, -1, draw_of(*draws[i], uniforms[i], vocabulary), tops, vocabulary);
      for (int32_t p = 1; p < places[i]; ++p)
        want(last + p, -1, draw_of(*draws[i], (*after)[p - 1], vocabulary), tops, vocabulary);
    }
    require(guessed == drafted.end(), "drafts of a sequence that draws nothing");
    require(extra == asked.end(), "more is asked of a sequence that is not in the step");
    require(positions_.size() == tokens_.size(), "counts do not add up to the tokens");
    if (adjustments) adjustments->attach(params_, drawn, places, vocabulary);
    out_tokens_.resize(wanted_.size());
    out_logprobs_.resize(wanted_.size());
    top_tokens_.resize(top_offsets_.back());
    top_logprobs_.resize(top_offsets_.back());
  }

  // Checks that every token id is below `tokens` and every block below `blocks`; 0 tokens: no check.
  void check(int tokens, int blocks) const {
    for (int32_t token : tokens_)
      require(!tokens || (token >= 0 && token < tokens), "a token id is outside the vocabulary");
    for (int32_t block : tables_)
      require(block >= 0 && block < blocks, "a block table names a block outside the pool");
  }

  Step step() {
    const bool has_tops = top_offsets_.back() > 0;
    return {static_cast<int>(tokens_.size()),
            tokens_.data(),
            positions_.data(),
            owners_.data(),
            tables_.data(),
            static_cast<int>(width_),
            static_cast<int>(wanted_.size()),
            wanted_.data(),
            targets_.data(),
            params_.data(),
            out_tokens_.data(),
            out_logprobs_.data(),
            has_tops ? top_offsets_.data() : nullptr,
            has_tops ? top_tokens_.data() : nullptr,
            has_tops ? top_logprobs_.data() : nullptr};
  }

  Answers take_answers() {
    Tops tops;
    for (size_t i = 0; top_offsets_.back() > 0 && i < wanted_.size(); ++i) {
      auto& some = tops.emplace_back();
      for (int32_t at = top_offsets_[i]; at < top_offsets_[i + 1]; ++at)
        some.emplace_back(top_tokens_[at], top_logprobs_[at]);
    }
    return {std::move(out_tokens_), std::move(out_logprobs_), std::move(tops)};
  }

 private:
  // One row per table, the shorter ones padded with 0.
  void lay_tables(const std::vector<Ints>& tables) {
    for (const Ints& table : tables) width_ = std::max(width_, table.size());
    tables_.resize(tables.size() * width_);
    for (size_t i = 0; i < tables.size(); ++i)
      std::copy(tables[i].begin(), tables[i].end(), tables_.begin() + i * width_);
  }

  void want_targets(const Ints& targets, int first, int count, int tops, int vocabulary) {
    require(targets.empty() || static_cast<int>(targets.size()) == count,
            "a sequence has not one target for each of its tokens");
    for (size_t t = 0; t < targets.size(); ++t) {
      require(targets[t] >= 0 && targets[t] < vocabulary, "a target is outside the vocabulary");
      want(first + static_cast<int>(t), targets[t], {}, tops, vocabulary);
    }
  }

  void want(int row, int32_t target, const DrawParams& params, int tops, int vocabulary) {
    require(tops >= 0 && tops <= vocabulary,
            "more top tokens are wanted than the vocabulary has");
    wanted_.push_back(row);
    targets_.push_back(target);
    params_.push_back(params);
    top_offsets_.push_back(top_offsets_.back() + tops);
  }

  Ints tokens_, positions_, owners_, tables_, wanted_, targets_;
  size_t width_ = 0;  // of the longest table
  std::vector<DrawParams> params_;
  Ints out_tokens_, top_offsets_{0}, top_tokens_;
  std::vector<float> out_logprobs_, top_logprobs_;
};

}  // namespace headrace
