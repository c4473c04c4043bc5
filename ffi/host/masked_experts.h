// The experts of a rank that have rows, as a GPU notes them in shared memory (cuda/kernel/storage.cuh): for walks over tasks
// that follow from their numbers.
#pragma once

#include <cstdint>
#include <vector>

#include "common/shape.h"
#include "common/units.h"

namespace jaxmoe {

class MaskedExperts {
 public:
  // Experts without rows may have a mark in the place of 0.
  MaskedExperts(const Schedule& schedule, const int32_t* rows_per_expert, int32_t num_experts)
      : with_rows_(NarrowExperts::words(num_experts)) {
    bool some_have_more = false;
    for (int32_t expert = 0; expert < num_experts; ++expert) {
      const int32_t rows = rows_per_expert[expert];
      if (rows <= 0) continue;
      with_rows_[expert / NarrowExperts::kOfWord] |= 1u << expert % NarrowExperts::kOfWord;
      some_have_more = some_have_more || rows > schedule.narrow_rows;
      ++narrow_;
    }
    if (some_have_more) narrow_ = 0;
  }

  // Valid as long as this is.
  NarrowExperts narrow() const { return {narrow_, with_rows_.data()}; }

 private:
  std::vector<uint32_t> with_rows_;
  int32_t narrow_ = 0;
};

}  // namespace jaxmoe
