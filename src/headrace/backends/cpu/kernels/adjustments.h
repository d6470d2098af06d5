// Which draws have their logits adjusted first, and how, as passed from Python: the row of the plan and,
// if any row has drafts, the place in it (0: the first draw; empty: all are); sparse
// parts are (offsets, ids) or (offsets, ids, values) over the adjusted rows. Checked here.
#pragma once

#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "arrays.h"
#include "sampling.h"

namespace headrace {

class Adjustments {
 public:
  using Ids = std::tuple<IntArray, IntArray>;
  using Valued = std::tuple<IntArray, IntArray, FloatArray>;
  using Masks = std::tuple<IntArray, Bytes>;

  Adjustments(IntArray rows, FloatMatrix penalties, IntArray limited, Valued bias, Ids allowed,
              Ids banned, Ids seen, Valued counts, Masks masks, std::optional<IntArray> places)
      : rows_(rows), places_(places), bias_(bias), allowed_(allowed), banned_(banned), seen_(seen), counts_(counts),
        masks_(masks) {
    const size_t n = rows.size();
    require(penalties.shape(0) == n && penalties.shape(1) == 3 && limited.size() == n,
            "arrays about the adjusted rows differ in length");
    require(!places || places->size() == n, "arrays about the adjusted rows differ in length");
    made_.reserve(n);
    for (const Ids* part : {&allowed_, &banned_, &seen_})
      check_offsets(std::get<0>(*part), n, std::get<1>(*part).size(), "bad offsets of token ids");
    for (const Valued* part : {&bias_, &counts_}) {
      check_offsets(std::get<0>(*part), n, std::get<1>(*part).size(), "bad offsets of token ids");
      require(std::get<1>(*part).size() == std::get<2>(*part).size(),
              "token ids and their values differ in length");
    }
    check_offsets(std::get<0>(masks_), n, std::get<1>(masks_).size(), "bad offsets of masks");
    for (size_t i = 0; i < n; ++i) {
      const float* p = penalties.data() + 3 * i;
      const int limits = limited.data()[i];
      made_.push_back({p[0], p[1], p[2], (limits & ALLOWED) != 0, (limits & MASKED) != 0,
                       valued(bias_, i), ids(allowed_, i), ids(banned_, i), ids(seen_, i),
                       valued(counts_, i), mask(i)});
    }
  }

  // Point the params of adjusted draws at their adjustments. `drawn` is the index of the params of
  // each row's first draw, or -1; `places` how many it has.
  void attach(std::vector<DrawParams>& params, const std::vector<int32_t>& drawn,
              const std::vector<int32_t>& places, int vocabulary) const {
    const char* message = "a draw names a token outside the vocabulary";
    check_rows(rows_, 0, static_cast<int>(drawn.size()), "an adjusted row is not in the step");
    for (const Ids* part : {&allowed_, &banned_, &seen_})
      check_rows(std::get<1>(*part), 0, vocabulary, message);
    for (const Valued* part : {&bias_, &counts_})
      check_rows(std::get<1>(*part), 0, vocabulary, message);
    for (size_t i = 0; i < made_.size(); ++i) {
      const int32_t row = rows_.data()[i], place = places_ ? places_->data()[i] : 0;
      require(drawn[row] >= 0, "an adjusted row draws nothing");
      require(place >= 0 && place < places[row], "an adjusted place is not in its row");
      params[drawn[row] + place].adjustment = &made_[i];
    }
  }

 private:
  // Bits of `limited`: whether a list of ids and whether a mask limits what a row may draw.
  enum Limits { ALLOWED = 1, MASKED = 2 };

  template <typename Part>
  static std::span<const int32_t> ids(const Part& part, size_t i) {
    const int32_t* offsets = std::get<0>(part).data();
    return {std::get<1>(part).data() + offsets[i], std::get<1>(part).data() + offsets[i + 1]};
  }
  static Adjustment::Valued valued(const Valued& part, size_t i) {
    const auto named = ids(part, i);
    return {named, {std::get<2>(part).data() + std::get<0>(part).data()[i], named.size()}};
  }

  std::span<const uint8_t> mask(size_t i) const {
    const int32_t* offsets = std::get<0>(masks_).data();
    return {std::get<1>(masks_).data() + offsets[i], std::get<1>(masks_).data() + offsets[i + 1]};
  }

  IntArray rows_;
  std::optional<IntArray> places_;
  Valued bias_;
  Ids allowed_, banned_, seen_;
  Valued counts_;
  Masks masks_;
  std::vector<Adjustment> made_;  // their spans point into the arrays above
};

}  // namespace headrace
